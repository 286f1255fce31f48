//! Images from mmdebstrap, umoci, buildah and skopeo, pulled from a real docker-registry and loaded
//! from archives, in real guests. `cargo xtask test` creates the images (xtask/src/images) and
//! passes their directory in `PODVISOR_TEST_IMAGES`.

mod support;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use podvisor_images::{PullOptions, Store};
use support::foreign::{self, Registry};
use support::tree::{self, Tree};
use support::{Ran, Root};

/// One guest at a time: more are no faster on a machine with a single processor.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pulls `repository` of the images' registry; returns the root and the image's name.
fn pulled(repository: &str) -> (Root, String) {
    let root = Root::default();
    let registry = Registry::start();
    let name = registry.name(repository);
    let ran = root.output(&["pull", "--quiet", &name]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    (root, name)
}

/// Loads an archive with one image; returns the root and the image's name.
fn loaded(archive: &str) -> (Root, String) {
    let root = Root::default();
    let store = Store::open(root.path().join("images")).unwrap();
    let images = store.load(foreign::path(archive), None, &PullOptions::default());
    let images = images.unwrap();
    let names: Vec<&String> = images.iter().flat_map(|loaded| &loaded.names).collect();
    assert_eq!(names.len(), 1, "{names:?}");
    let name = names[0].clone();
    (root, name)
}

/// Checks the output of the busybox image with buildah's settings, regardless of its source; and
/// that its guests use no disk space.
fn says_what_buildah_set((root, name): &(Root, String)) {
    // The first one creates the directory of containers.
    root.output(&["run", "--rm", name]).printed("buildah's\n");
    let before = disk_use(root.path());
    let script = [
        "run",
        "--rm",
        name,
        "sh",
        "-c",
        "echo $FROM; pwd; id -u; id -g",
    ];
    root.output(&script).printed("buildah\n/home\n1000\n50\n");
    assert_eq!(disk_use(root.path()), before);
}

/// Returns the bytes of allocated blocks and the number of files below `directory`, without the
/// event log, which has entries of removed containers.
fn disk_use(directory: &Path) -> (u64, u64) {
    let meta = fs::symlink_metadata(directory).unwrap();
    let mut used = (meta.blocks() * 512, 1);
    if meta.is_dir() {
        for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
            if entry.file_name() == "events.log" {
                continue;
            }
            let (bytes, files) = disk_use(&entry.path());
            used = (used.0 + bytes, used.1 + files);
        }
    }
    used
}

#[test]
fn guest_runs_a_docker_archive_of_buildahs() {
    let _turn = turn();
    says_what_buildah_set(&loaded("busybox.docker.tar"));
}

#[test]
fn guest_runs_an_oci_archive_of_skopeos() {
    let _turn = turn();
    says_what_buildah_set(&loaded("busybox.oci.tar"));
}

#[test]
fn guest_runs_what_skopeo_pushed_as_docker_schema_2() {
    let _turn = turn();
    says_what_buildah_set(&pulled("schema2"));
}

#[test]
fn guest_runs_a_debian_of_mmdebstraps_in_zstd_by_skopeo() {
    let _turn = turn();
    let (root, name) = pulled("zstd");
    let script =
        "perl -e 'print 6 * 7, \"\\n\"'; dpkg --verify perl-base; dpkg -l perl-base | grep -c ^ii";
    root.output(&["run", &name, "sh", "-c", script])
        .printed("42\n1\n");
}

/// Mount points of the runtime, which hide the image's files.
const MOUNTS: [&str; 3] = ["/proc", "/sys", "/dev"];
/// Files that the runtime writes into each container.
const WRITTEN: [&str; 2] = ["/etc/hostname", "/etc/hosts"];
/// Directories that it writes into; overlayfs does not count links of such directories, and their
/// time is new.
const WRITTEN_INTO: [&str; 2] = ["/", "/etc"];

/// Removes the runtime's files, which are not the image's.
fn of_the_image(mut tree: Tree) -> Tree {
    let below = |path: &str, directory: &str| {
        path.strip_prefix(directory)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    tree.retain(|path, _| {
        !WRITTEN.contains(&path.as_str()) && !MOUNTS.iter().any(|mount| below(path, mount))
    });
    for directory in WRITTEN_INTO {
        let file = tree
            .get_mut(directory)
            .expect("a directory that is always there");
        file.remove("links");
        file.remove("mtime");
    }
    tree
}

#[test]
fn guest_sees_the_tree_of_a_debian_as_umoci_unpacks_it() {
    let _turn = turn();
    let (root, name) = pulled("layers");
    let mut command = root.podvisor(&["run", "--memory", "512M", &name, "sh", "-c", tree::LIST]);
    let output = command.output().unwrap();
    let listing = output.stdout.clone();
    let ran = Ran::new(output);
    assert_eq!(
        (ran.code, ran.stderr.as_str()),
        (Some(0), ""),
        "{}",
        ran.stdout.chars().take(2000).collect::<String>()
    );
    let found = of_the_image(tree::parse_guest(&listing));
    let expected = fs::read_to_string(foreign::path("layers.list")).unwrap();
    let expected = of_the_image(tree::parse_listing(&expected));
    assert!(expected.len() > 9000, "{} files", expected.len());
    let differences = tree::differences(&expected, &found);
    assert!(
        differences.is_empty(),
        "{} differences:\n{}",
        differences.len(),
        differences[..differences.len().min(50)].join("\n")
    );
}
