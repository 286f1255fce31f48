//! `cargo xtask demo`: a program from a real OCI image, in a guest on KVM; then a pod of two
//! containers over the Container Runtime Interface.
//!
//! The registry and the pulls run on this machine, as they need no KVM; `podvisor run` and
//! `podvisor serve` run in a host whose KVM is sound, which sees the images at the same path.

pub(crate) mod image;
mod pod;
pub(crate) mod registry;

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::host::{self, Request};
use crate::report::{self, Step};
use crate::{cargo, guest, paths, process, setup, space};
use registry::Registry;

/// The program that runs in the guest.
const PROGRAM: &str = "uname -a; id; mount; ls -l /; echo hello";

/// Repository and tag of the demo's image.
const REPOSITORY: &str = "demo/busybox";
const TAG: &str = "1";

/// The image of the pod's second container.
const CLIENT_REPOSITORY: &str = "demo/client";

pub(crate) fn command() -> Result<ExitCode> {
    let began = Instant::now();
    let mut times: Vec<(&str, Duration)> = Vec::new();
    let mut timed = |name, took| times.push((name, took));

    space::ensure(space::DEMO)?;
    if !guest::is_there() {
        report::note(
            "the first time, the guest's kernel, its agent and podvisor are built: ten to fifteen \
             minutes on two CPUs",
        );
    }
    let step = Step::begin("packages");
    setup::ensure(&[setup::KERNEL, setup::HOST, setup::BUILD, setup::DEMO])?;
    timed("packages", step.done());

    let step = Step::begin("guest kernel and agent");
    let [kernel, initramfs] = guest::ensure()?;
    timed("guest kernel and agent", step.done());

    let step = Step::begin("podvisor");
    // Not a release, which takes longer to build: the guests take seconds either way.
    let built = cargo::build("podvisor-cri", &["podvisor"], &["pod"])?;
    let podvisor = built.join("podvisor");
    timed("podvisor", step.done());

    let step = Step::begin("a registry, and an image in it");
    let directory = paths::target().join("demo");
    if directory.exists() {
        fs::remove_dir_all(&directory)
            .with_context(|| format!("{} cannot be emptied", directory.display()))?;
    }
    fs::create_dir_all(&directory)?;
    let image = image::make(&directory.join("image"), "hello from layer 3")?;
    let client = image::make(&directory.join("client"), "hello from the client's image")?;
    let registry = Registry::start(&directory.join("registry"))?;
    registry.push(&image, REPOSITORY, TAG)?;
    registry.push(&client, CLIENT_REPOSITORY, TAG)?;
    let reference = format!("{}/{REPOSITORY}:{TAG}", registry.address());
    let client = format!("{}/{CLIENT_REPOSITORY}:{TAG}", registry.address());
    for layer in &image.layers {
        eprintln!(
            "    layer {} ({} bytes): {}",
            layer.blob.short(),
            layer.blob.size,
            layer.what
        );
    }
    timed("registry and push", step.done());

    let store = directory.join("store");
    let step = Step::begin(format!("podvisor pull {reference}"));
    for image in [&reference, &client] {
        process::run(
            process::tied(&podvisor)
                .arg("--root")
                .arg(&store)
                .args(["pull", image])
                .stdin(Stdio::null()),
        )?;
    }
    timed("podvisor pull, two images", step.done());

    let step = Step::begin(format!("podvisor run {reference} sh -c '{PROGRAM}'"));
    let words = [
        podvisor.display().to_string(),
        "--root".to_owned(),
        store.display().to_string(),
        "run".to_owned(),
        reference.clone(),
        "sh".to_owned(),
        "-c".to_owned(),
        PROGRAM.to_owned(),
    ];
    let status = host::run_request(Request {
        command: words.to_vec(),
        environment: vec![(
            "PODVISOR_GUEST_DIR".to_owned(),
            paths::guest().display().to_string(),
        )],
        limit: Some(Duration::from_secs(300)),
        ..Request::default()
    })?;
    timed("podvisor run, with its host", step.done());

    let step = Step::begin("podvisor serve, and a pod of two containers");
    let example = built.join("examples/pod");
    let images = [reference.as_str(), client.as_str()];
    let of_pod = pod::run(&directory, &podvisor, &example, &store, images)?;
    timed("the pod, with its host", step.done());
    drop(registry);

    println!();
    println!("The program's exit code: {status}");
    println!();
    println!("What went where:");
    show("the image's layers", &directory.join("image"))?;
    show("the registry's data", &directory.join("registry"))?;
    show("podvisor's store", &store)?;
    show("the guest's kernel", &kernel)?;
    show("the guest's agent", &initramfs)?;
    println!();
    println!("What took how long:");
    for (name, time) in &times {
        println!("{:>12}  {name}", report::time(*time));
    }
    println!("{:>12}  in all", report::time(began.elapsed()));
    if status != 0 {
        bail!("the program in the guest ended with {status}");
    }
    if of_pod != 0 {
        bail!("the pod ended with {of_pod}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the path and the size of a file.
fn show(what: &str, path: &Path) -> Result<()> {
    let text = process::output(
        Command::new("du")
            .args(["-sh", "--apparent-size"])
            .arg(path),
    )?;
    let size = text.split_whitespace().next().unwrap_or("?");
    println!("{size:>12}  {what}: {}", paths::display(path));
    Ok(())
}
