//! Pulls an image into a store and says where its file system is: `pull STORE REFERENCE`.

use podvisor_images::{PullEvent, PullOptions, Store};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(root), Some(reference)) = (arguments.next(), arguments.next()) else {
        return Err("usage: pull STORE REFERENCE".into());
    };
    let store = Store::open(root)?;
    let (events, mut told) = tokio::sync::mpsc::unbounded_channel();
    let options = PullOptions::default().events(events);
    let printer = tokio::spawn(async move {
        while let Some(event) = told.recv().await {
            match event {
                PullEvent::LayerBytes { .. } => {}
                other => eprintln!("{other:?}"),
            }
        }
    });
    let image = store.pull(&reference, &options).await?;
    drop(options);
    printer.await?;
    println!("{}\n{}", image.id(), image.rootfs().display());
    Ok(())
}
