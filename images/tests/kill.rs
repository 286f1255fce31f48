//! A process that is killed in the middle of a pull loses nothing that was there and leaves nothing half.

mod support;

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use podvisor_images::{Digest, Error, Image, Prune, Store};
use support::image::{Layer, Packing};
use support::{Faulty, Tarball, TestImage, TestStore, options};

/// System calls that change what is on the disk.
const WRITES: &str = "write,pwrite64,pwritev,fsync,fdatasync,sync_file_range,ftruncate,fallocate,rename,renameat,\
    renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat";

/// Where the other process pulls from and to.
const JOB: &str = "PODVISOR_TEST_PULL";

/// The pull that gets killed when this binary runs itself; by itself a pull as any other.
#[tokio::test]
async fn pulls_as_a_process_of_its_own() {
    if let Ok(job) = std::env::var(JOB) {
        let (root, name) = job.split_once(' ').unwrap();
        Store::open(root)
            .unwrap()
            .pull(name, &options())
            .await
            .unwrap();
        return;
    }
    let server = Faulty::serve(TestImage::small(), |_| None);
    assert_eq!(
        TestStore::new().pull(&server.name()).await.unwrap().id(),
        TestImage::small().id()
    );
}

fn fingerprint(image: &Image) -> Digest {
    Digest::of(&std::fs::read(image.rootfs()).unwrap())
}

#[test]
fn killed_at_every_write_the_store_is_whole() {
    let noise: Vec<u8> = (0..100_000u32)
        .flat_map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes())
        .collect();
    let image = TestImage::new(vec![
        Layer::new(
            &Tarball::new()
                .file("noise", 0o644, &noise)
                .file("gone", 0o644, &noise)
                .finish(),
            Packing::Gzip,
        ),
        Layer::new(
            &Tarball::new().file(".wh.gone", 0, b"").finish(),
            Packing::Plain,
        ),
    ]);
    let server = Faulty::serve(image.clone(), |_| None);
    let test = TestStore::new();
    let layout = tempfile::tempdir().unwrap();
    TestImage::small().write_layout(layout.path(), "x");
    let old = test
        .store
        .load(layout.path(), Some("old"), &options())
        .unwrap()
        .remove(0);
    let old_print = fingerprint(&old);
    let mut new_print = None;
    let mut kills = 0;
    for call in 1.. {
        assert!(call < 1000, "the pull does not end");
        let status = Command::new("strace")
            .args(["-f", "-qq", "-o", "/dev/null"])
            .args(["-e", &format!("trace={WRITES}")])
            .args(["-e", &format!("inject={WRITES}:signal=KILL:when={call}")])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "pulls_as_a_process_of_its_own"])
            .env(
                JOB,
                format!("{} {}", test.dir.path().display(), server.name()),
            )
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .status()
            .expect("strace is needed: apt-get install strace");
        let killed = status.signal() == Some(9) || status.code() == Some(128 + 9);
        assert!(killed || status.success(), "{status}");
        kills += usize::from(killed);

        let store = Store::open(test.dir.path()).unwrap();
        assert_eq!(
            fingerprint(&store.resolve("old").unwrap()),
            old_print,
            "call {call}"
        );
        match store.resolve(&server.name()) {
            Ok(new) => {
                let print = fingerprint(&new);
                assert_eq!(*new_print.get_or_insert(print), print, "call {call}");
                store.remove(&server.name()).unwrap();
            }
            Err(Error::NotFound { .. }) => assert!(killed, "call {call}"),
            Err(error) => panic!("call {call}: {error:?}"),
        }
        assert!(
            test.files().iter().all(|file| !file.starts_with("tmp/")),
            "call {call}: {:?}",
            test.files()
        );
        store.prune(&Prune::default()).unwrap();
        let left = [format!("images/{}/rootfs.erofs", old.id().hex())];
        assert!(
            test.files()
                .iter()
                .filter(|file| file.starts_with("images/"))
                .eq(&left),
            "call {call}"
        );
        if !killed {
            break;
        }
    }
    assert!(kills > 20, "only {kills} kills");
}
