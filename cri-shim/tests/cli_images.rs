//! Effects, output and errors of the commands for images: load, save, tag, prune, inspect, history.

mod support;

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use support::image::Image;
use support::registry::Registry;
use support::{Ran, Root};

const NAME: &str = "docker.io/library/app:1";

/// Creates a root with an image of busybox under [`NAME`]; returns it with the image's id.
fn root() -> (Root, String) {
    let root = Root::default();
    let image = Image::busybox(json!({ "Cmd": ["sh"], "Healthcheck": { "Test": ["NONE"] } }));
    let id = image.config.digest.clone();
    let registry = Registry::serve(&[("app", image)]);
    let name = registry.name("app");
    root.output(&["pull", "-q", &name])
        .printed(&format!("{id}\n"));
    root.output(&["tag", &name, "app:1"]).printed("");
    assert_eq!(root.output(&["rmi", &name]).code, Some(0));
    (root, id)
}

fn file(root: &Root, name: &str) -> String {
    root.path().join(name).display().to_string()
}

#[test]
fn a_directory_of_settings_says_where_a_registry_is() {
    let root = Root::default();
    let image = Image::busybox(json!({ "Cmd": ["sh"] }));
    let id = image.config.digest.clone();
    let registry = Registry::serve(&[("app", image)]);
    let address = registry.name("app").replace("/app:1", "");
    let directory = root.path().join("certs.d/registry.example");
    fs::create_dir_all(&directory).unwrap();
    let settings = directory.join("hosts.toml");
    fs::write(&settings, format!("server = \"http://{address}\"")).unwrap();
    let hosts = file(&root, "certs.d");
    let pull = [
        "pull",
        "-q",
        "--hosts-dir",
        &hosts,
        "registry.example/app:1",
    ];
    root.output(&pull).printed(&format!("{id}\n"));

    fs::write(&settings, "skip_verify = true").unwrap();
    root.output(&pull).refused(1, &["hosts.toml", "`ca`"]);
    let nowhere = ["pull", "--hosts-dir", "/no/such/directory", "app"];
    root.output(&nowhere)
        .refused(1, &["cannot read /no/such/directory"]);
}

/// Returns all files under the root that belong to images, with their contents.
fn contents(root: &Root) -> Vec<(PathBuf, Vec<u8>)> {
    let mut files = root.files_ending_in("");
    files.retain(|file| file.starts_with(root.path().join("images")));
    files.retain(|file| !file.ends_with("store.redb"));
    files.sort();
    let with_bytes = files.into_iter().map(|file| {
        let bytes = fs::read(&file).unwrap();
        (file, bytes)
    });
    with_bytes.collect()
}

#[test]
fn a_saved_image_is_loaded_from_a_file_stdin_and_a_pipe() {
    let (root, id) = root();
    let tar = file(&root, "app.tar");
    root.output(&["save", "-o", &tar, "app:1"]).printed("");
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&tar).unwrap().permissions());
    assert_eq!(mode & 0o600, 0o600);
    let piped = root.podvisor(&["save", "app:1"]).output().unwrap();
    assert!(piped.stdout == fs::read(&tar).unwrap());
    let dash = root.podvisor(&["save", "-o", "-", "app:1"]).output();
    assert!(dash.unwrap().stdout == piped.stdout);

    let loaded = format!("Loaded image: {NAME}\n");
    let from_file = Root::default();
    let ran = from_file.output(&["load", "-i", &tar]);
    ran.printed(&loaded);
    assert!(ran.stderr.contains("unpacking"), "{ran:?}");
    let ids = from_file.output(&["image", "ls", "-q", "--no-trunc"]);
    ids.printed(&format!("{id}\n"));

    let from_stdin = Root::default();
    let mut command = from_stdin.podvisor(&["load", "-q"]);
    let ran = Ran::new(command.stdin(File::open(&tar).unwrap()).output().unwrap());
    ran.printed(&loaded);
    assert_eq!(ran.stderr, "");

    let from_pipe = Root::default();
    let mut child = from_pipe
        .podvisor(&["load", "--json", "-i", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(&piped.stdout).unwrap();
    drop(stdin);
    let views: Value = serde_json::from_str(&Ran::of(child).stdout).unwrap();
    assert_eq!(views[0]["id"], json!(id));
    assert_eq!(views[0]["repoTags"], json!([NAME]));
    assert_eq!(views[0]["names"], json!([NAME]));
}

#[test]
fn loading_tells_the_names_of_the_archive_whatever_others_the_image_has() {
    let (root, id) = root();
    let [named, unnamed] = ["named.tar", "unnamed.tar"].map(|name| file(&root, name));
    root.output(&["save", "-o", &named, "app:1"]).printed("");
    root.output(&["save", "-o", &unnamed, &id]).printed("");
    root.output(&["tag", "app:1", "other:2"]).printed("");
    root.output(&["load", "-i", &named])
        .printed(&format!("Loaded image: {NAME}\n"));
    root.output(&["load", "-i", &unnamed])
        .printed(&format!("Loaded image ID: {id}\n"));
    let names = json!([NAME, "docker.io/library/other:2"]);
    for (tar, loaded) in [(&named, json!([NAME])), (&unnamed, json!([]))] {
        let ran = root.output(&["load", "--json", "-i", tar]);
        let views: Value = serde_json::from_str(&ran.stdout).unwrap();
        assert_eq!(
            (&views[0]["names"], &views[0]["repoTags"]),
            (&loaded, &names)
        );
    }
}

#[test]
fn skopeo_reads_both_formats() {
    let (root, id) = root();
    for (format, transport) in [
        ("docker-archive", "docker-archive"),
        ("oci-archive", "oci-archive"),
    ] {
        let tar = file(&root, format);
        root.output(&["save", "--format", format, "-o", &tar, "app:1"])
            .printed("");
        let from = format!("{transport}:{tar}:{NAME}");
        let out = Command::new("skopeo")
            .args(["inspect", "--config", "--raw", &from])
            .output()
            .expect("skopeo is needed: apt-get install skopeo");
        assert!(out.status.success(), "{out:?}");
        let config = String::from_utf8(out.stdout).unwrap();
        let digest = <sha2::Sha256 as sha2::Digest>::digest(config.trim_end());
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(format!("sha256:{hex}"), id);
    }
}

#[test]
fn what_is_no_archive_says_so_and_leaves_the_store_alone() {
    let (root, _) = root();
    let before = contents(&root);
    let text = file(&root, "text");
    fs::write(&text, "not a tar\n".repeat(100)).unwrap();
    root.output(&["load", "-i", &text])
        .refused(1, &["not a tar archive"]);
    let mut command = root.podvisor(&["load"]);
    Ran::new(command.stdin(File::open(&text).unwrap()).output().unwrap())
        .refused(1, &["not a tar archive"]);
    root.output(&["load"]).refused(1, &["no image"]);
    root.output(&["load", "-i", "/no/such.tar"])
        .refused(1, &["/no/such.tar"]);
    assert!(contents(&root) == before);
}

/// Returns both ends of a terminal.
fn terminal() -> (OwnedFd, File) {
    let flags = rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY;
    let master = rustix::pty::openpt(flags).unwrap();
    rustix::pty::grantpt(&master).unwrap();
    rustix::pty::unlockpt(&master).unwrap();
    let name = rustix::pty::ptsname(&master, Vec::new()).unwrap();
    let path = Path::new(name.to_str().unwrap()).to_owned();
    let slave = File::options().read(true).write(true).open(path).unwrap();
    (master, slave)
}

#[test]
fn archives_are_kept_from_terminals() {
    let (root, _) = root();
    let (_master, slave) = terminal();
    let mut command = root.podvisor(&["save", "app:1"]);
    command.stdout(slave.try_clone().unwrap());
    let child = command.stderr(Stdio::piped()).spawn().unwrap();
    Ran::of(child).refused(1, &["terminal", "--output"]);
    let mut command = root.podvisor(&["load"]);
    Ran::new(command.stdin(slave).output().unwrap()).refused(1, &["terminal", "--input"]);
}

#[test]
fn a_save_that_fails_leaves_no_file_and_keeps_an_old_one() {
    let (root, _) = root();
    let directory = root.path().join("out");
    fs::create_dir(&directory).unwrap();
    let tar = directory.join("x.tar").display().to_string();
    let names = || -> Vec<_> {
        let entries = fs::read_dir(&directory).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect()
    };
    root.output(&["save", "-o", &tar, "nosuch"])
        .refused(1, &["nosuch"]);
    assert!(names().is_empty());
    fs::write(&tar, "old").unwrap();
    root.output(&["save", "-o", &tar, "app:1", "nosuch"])
        .refused(1, &["nosuch"]);
    assert_eq!(fs::read(&tar).unwrap(), b"old");
    root.output(&["save", "-o", "/no/such/x.tar", "app:1"])
        .refused(1, &["cannot write /no/such/x.tar"]);
    root.output(&["save", "-o", directory.to_str().unwrap(), "app:1"])
        .refused(1, &["is a directory"]);
    root.output(&["save", "-o", "/dev/full", "app:1"])
        .refused(1, &["no space left for /dev/full"]);
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut command = root.podvisor(&["save", "app:1"]);
    let child = command.stdout(full).stderr(Stdio::piped()).spawn();
    Ran::of(child.unwrap()).refused(1, &["stdout", "No space left"]);
    root.output(&["save", "-o", "/dev/null", "app:1"])
        .printed("");
    assert_eq!(names().len(), 1);

    // Through a link, the link's target is replaced.
    let link = directory.join("link");
    std::os::unix::fs::symlink("x.tar", &link).unwrap();
    root.output(&["save", "-o", link.to_str().unwrap(), "app:1"])
        .printed("");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(fs::metadata(&tar).unwrap().len() > 10_000);
}

#[test]
fn a_save_that_is_killed_leaves_no_half_file() {
    let (root, _) = root();
    let whole = root.podvisor(&["save", "app:1"]).output().unwrap().stdout;
    let directory = root.path().join("out");
    // The temporary file exists after `openat`.
    for (signal, code, calls) in [
        ("TERM", 143, "openat,write,fsync,rename"),
        ("KILL", 137, "write,fsync,rename"),
    ] {
        fs::create_dir(&directory).unwrap();
        let tar = directory.join("x.tar");
        let mut interrupted = 0;
        for call in 1.. {
            let podvisor = root.podvisor(&["save", "app:1", "-o", tar.to_str().unwrap()]);
            let trace = format!("trace={calls}");
            let inject = format!("inject={calls}:signal={signal}:when={call}");
            let mut command = Command::new("strace");
            command
                .args(["-f", "-qq", "-o", "/dev/null"])
                .args(["-e", &trace, "-e", &inject])
                .arg(podvisor.get_program())
                .args(podvisor.get_args())
                .env("PODVISOR_ROOT", root.path());
            let status = command
                .status()
                .expect("strace is needed: apt-get install strace");
            let is_done = status.success();
            let ended = status.code().or(status.signal().map(|signal| 128 + signal));
            assert!(is_done || ended == Some(code), "{status}");
            interrupted += usize::from(!is_done);
            match fs::read(&tar) {
                Ok(bytes) => assert!(bytes == whole, "{signal} {call}"),
                Err(_) => assert!(!is_done, "{signal} {call}"),
            }
            // Cleanup is impossible after SIGKILL.
            if signal == "TERM" {
                let mut left = fs::read_dir(&directory).unwrap().flatten();
                assert!(left.all(|entry| entry.path() == tar), "{signal} {call}");
            }
            if is_done {
                break;
            }
        }
        assert!(interrupted > 3, "{signal} {interrupted}");
        fs::remove_dir_all(&directory).unwrap();
    }
}

#[test]
fn a_save_into_a_pipe_that_is_full_can_be_interrupted() {
    let (root, _) = root();
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        // A full pipe blocks podvisor during its work.
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut child = root
            .podvisor(&["save", "app:1"])
            .stdout(writer)
            .spawn()
            .unwrap();
        reader.read_exact(&mut [0; 512]).unwrap();
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code));
    }
}

#[test]
fn a_load_that_is_interrupted_leaves_the_store_alone() {
    let (root, _) = root();
    let before = contents(&root);
    let tar = file(&root, "app.tar");
    root.output(&["save", "-o", &tar, "app:1"]).printed("");
    let bytes = fs::read(&tar).unwrap();
    let mut child = root
        .podvisor(&["load"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // More than a pipe's capacity: podvisor is working once all of it is written.
    stdin.write_all(&bytes[..500_000]).unwrap();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(contents(&root) == before);
}

#[test]
fn names_are_given_and_bad_ones_refused() {
    let (root, id) = root();
    root.output(&["tag", "app:1", "other", "localhost:5000/x:2"])
        .printed("");
    let list = root.output(&["images", "--json"]);
    let list: Value = serde_json::from_str(&list.stdout).unwrap();
    let tags = json!([NAME, "docker.io/library/other:latest", "localhost:5000/x:2"]);
    assert_eq!(list[0]["repoTags"], tags);
    root.output(&["tag", "app:1", "Not/A Name"])
        .refused(1, &["Not/A Name", "lower case"]);
    root.output(&["tag", "nosuch", "x"])
        .refused(1, &["nosuch", "podvisor images"]);
    let digest = format!("x@{id}");
    root.output(&["tag", "app:1", &digest]).refused(1, &["x@"]);
}

#[test]
fn pruning_asks_first_and_takes_what_nobody_needs() {
    let (root, id) = root();
    root.output(&["prune"]).refused(1, &["--force"]);
    root.output(&["prune", "-f"])
        .printed("Total reclaimed space: 0B\n");
    root.output(&["image", "pin", "app:1"]).printed("");
    root.output(&["prune", "-af"])
        .printed("Total reclaimed space: 0B\n");
    root.output(&["image", "unpin", "app:1"]).printed("");
    root.output(&["image", "pin", "nosuch"])
        .refused(1, &["nosuch"]);
    root.output(&["prune", "-af", "--filter", "until=24h"])
        .printed("Total reclaimed space: 0B\n");
    root.output(&["prune", "-af", "--keep-size", "1G"])
        .printed("Total reclaimed space: 0B\n");
    let bad = root.output(&["prune", "--filter", "label=x"]);
    assert_eq!(bad.code, Some(2), "{bad:?}");
    assert!(bad.stderr.contains("until=24h"), "{bad:?}");

    let ask = |answer: &[u8]| {
        let (master, slave) = terminal();
        let mut command = root.podvisor(&["prune", "-a"]);
        let child = command
            .stdin(slave)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        rustix::io::write(&master, answer).unwrap();
        Ran::of(child)
    };
    let no = ask(b"n\n");
    no.printed("");
    assert!(no.stderr.contains("[y/N]"), "{no:?}");
    let yes = ask(b"y\n");
    assert_eq!(yes.code, Some(0), "{yes:?}");
    let words = format!("Untagged: {NAME}\nDeleted: {id}\nTotal reclaimed space: ");
    assert!(yes.stdout.contains(&words), "{yes:?}");
    assert_eq!(root.output(&["images", "-q"]).stdout, "");
    let json = root.output(&["prune", "-f", "--json"]);
    let json: Value = serde_json::from_str(&json.stdout).unwrap();
    let nothing = json!({
        "containers": [], "pods": [], "untagged": [], "deleted": [], "freed": 0, "deferred": false,
    });
    assert_eq!(json, nothing);
}

#[test]
fn a_removal_that_fails_in_part_says_what_is_gone_and_why_the_rest_is_not() {
    let prunes = "\nTotal reclaimed space: ";
    for (command, end) in [
        (["prune", "-af"].as_slice(), prunes),
        (&["image", "prune", "-af"], prunes),
        (&["rmi", "app:1"], ""),
    ] {
        for json in [false, true] {
            let (root, id) = root();
            // A file that no image needs, in whose place is what cannot be removed as a file.
            let stays = root.path().join("images/blobs/sha256").join("0".repeat(64));
            fs::create_dir_all(stays.join("in it")).unwrap();
            let flags: &[&str] = if json { &["--json"] } else { &[] };
            let ran = root.output(&[command, flags].concat());
            ran.refused(1, &["/000000"]);
            match json {
                false => {
                    let words = format!("Untagged: {NAME}\nDeleted: {id}{end}");
                    assert!(ran.stdout.contains(&words), "{ran:?}");
                }
                true => {
                    let gone: Value = serde_json::from_str(&ran.stdout).unwrap();
                    let names = gone["untagged"].as_array().unwrap();
                    assert!(names.contains(&json!(NAME)), "{ran:?}");
                    assert_eq!(gone["deleted"], json!([id]), "{ran:?}");
                    assert!(gone["freed"].as_u64() > Some(0), "{ran:?}");
                }
            }
        }
    }
}

#[test]
fn files_that_others_are_at_stay_until_they_are_done_and_that_is_said() {
    let (root, _) = root();
    let (mut reader, writer) = std::io::pipe().unwrap();
    let saving = root
        .podvisor(&["save", "app:1"])
        .stdout(writer)
        .spawn()
        .unwrap();
    let mut archive = vec![0; 512];
    reader.read_exact(&mut archive).unwrap();
    let removed = root.output(&["rmi", "app:1"]);
    assert_eq!(removed.code, Some(0), "{removed:?}");
    assert!(
        removed.stderr.contains("stay until that ends"),
        "{removed:?}"
    );
    let blobs = || {
        fs::read_dir(root.path().join("images/blobs/sha256"))
            .unwrap()
            .count()
    };
    assert!(blobs() > 2);
    reader.read_to_end(&mut archive).unwrap();
    assert_eq!(Ran::of(saving).code, Some(0));
    assert_eq!(blobs(), 0);
    // Content that was removed meanwhile is complete in the archive.
    let tar = file(&root, "x.tar");
    fs::write(&tar, archive).unwrap();
    root.output(&["load", "-i", &tar])
        .printed(&format!("Loaded image: {NAME}\n"));
}

#[test]
fn an_image_that_is_used_is_neither_removed_nor_pruned() {
    let (root, _) = root();
    let rootfs = File::open(&root.files_ending_in(".erofs")[0]).unwrap();
    rustix::fs::flock(&rootfs, rustix::fs::FlockOperation::LockShared).unwrap();
    root.output(&["rmi", "app:1"])
        .refused(1, &["in use", "stop it"]);
    root.output(&["prune", "-af"])
        .printed("Total reclaimed space: 0B\n");
    drop(rootfs);
    assert_eq!(root.output(&["image", "rm", "app:1"]).code, Some(0));
}

#[test]
fn an_image_with_several_names_is_not_removed_by_its_id_without_force() {
    let (root, id) = root();
    let short = &id[7..19];
    root.output(&["tag", "app:1", "other:2"]).printed("");
    let other = "docker.io/library/other:2";
    for by_id in [short, &id] {
        let words = [by_id, NAME, other, "name one", "--force"];
        root.output(&["rmi", by_id]).refused(1, &words);
    }
    root.output(&["rmi", "other:2"])
        .printed(&format!("Untagged: {other}\n"));
    root.output(&["tag", "app:1", "other:2"]).printed("");
    let ran = root.output(&["rmi", "--force", short]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for line in [format!("Untagged: {NAME}\n"), format!("Deleted: {id}\n")] {
        assert!(ran.stdout.contains(&line), "{ran:?}");
    }
    let (root, id) = self::root();
    let ran = root.output(&["rmi", &id[7..19]]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
}

#[test]
fn an_inspection_has_docker_s_names_and_all_of_the_configuration() {
    let (root, id) = root();
    let ran = root.output(&["image", "inspect", "app:1", &id[7..19]]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let all: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(all[0], all[1]);
    assert_eq!(all[0]["Id"], json!(id));
    assert_eq!(all[0]["RepoTags"], json!([NAME]));
    assert_eq!(all[0]["Config"]["Cmd"], json!(["sh"]));
    assert_eq!(all[0]["Config"]["Healthcheck"]["Test"], json!(["NONE"]));
    assert_eq!(all[0]["Created"], "2026-01-02T03:04:05Z");
    assert_eq!(all[0]["RootFS"]["Layers"][0], all[0]["Layers"][0]["Digest"]);
    let ran = root.output(&["image", "inspect", "nosuch", "app:1"]);
    ran.refused(1, &["nosuch"]);
    let one: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(one.as_array().unwrap().len(), 1);
}

#[test]
fn the_history_has_a_row_for_each_step() {
    let (root, id) = root();
    let ran = root.output(&["history", "app:1"]);
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert_eq!(lines.len(), 2, "{ran:?}");
    assert!(lines[0].starts_with("IMAGE "), "{ran:?}");
    assert!(lines[1].starts_with(&id[7..19]), "{ran:?}");
    let json = root.output(&["image", "history", "--json", "app:1"]);
    let steps: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(steps[0]["id"], json!(id));
    assert!(steps[0]["size"].as_u64().unwrap() > 10_000);
    root.output(&["history", "nosuch"]).refused(1, &["nosuch"]);
}

#[test]
fn usage_is_told_in_text_and_json() {
    let (root, _) = root();
    let text = root.output(&["system", "df"]);
    assert!(text.stdout.contains("Images        1 "), "{text:?}");
    assert!(text.stdout.contains("Disk images   0 "), "{text:?}");
    assert!(text.stdout.contains(" inodes\n"), "{text:?}");
    let json = root.output(&["system", "df", "--json"]);
    let json: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(json["images"]["total"], 1);
    assert!(json["images"]["size"].as_u64().unwrap() > 10_000, "{json}");
    assert_eq!(json["images"]["size"], json["size"]);
    assert_eq!(json["disks"], json!({"total": 0, "size": 0}));
    assert!(json["inodes"].as_u64().unwrap() > 5, "{json}");
}

#[test]
fn a_directory_and_its_tar_are_imported_and_can_be_saved() {
    let root = Root::default();
    let directory = root.path().join("rootfs");
    fs::create_dir_all(directory.join("etc")).unwrap();
    fs::write(directory.join("etc/hello"), "hello\n").unwrap();
    let directory = directory.to_str().unwrap();
    let imported = root.output(&["import", "-q", directory, "mine:1"]);
    assert_eq!((imported.code, imported.stderr.as_str()), (Some(0), ""));
    let id = imported.stdout.trim_end().to_owned();
    let listed = root.output(&["images", "-q", "--no-trunc"]);
    listed.printed(&format!("{id}\n"));
    let again = root.output(&["image", "import", "--json", directory]);
    let again: Value = serde_json::from_str(&again.stdout).unwrap();
    assert_eq!(again["id"], json!(id));
    assert_eq!(again["repoTags"], json!(["docker.io/library/mine:1"]));

    let tar = file(&root, "rootfs.tar.gz");
    let packed = Command::new("tar")
        .args(["czf", &tar, "-C", directory, "."])
        .status();
    assert!(packed.unwrap().success());
    let from_file = root.output(&["import", &tar, "packed"]);
    assert_eq!(from_file.code, Some(0), "{from_file:?}");
    let mut command = root.podvisor(&["import", "-"]);
    let from_stdin = Ran::new(command.stdin(File::open(&tar).unwrap()).output().unwrap());
    from_stdin.printed(&from_file.stdout);

    let saved = file(&root, "saved.tar");
    root.output(&["save", "-o", &saved, "mine:1", "packed"])
        .printed("");
    let other = Root::default();
    other.output(&["load", "-i", &saved]).printed(
        "Loaded image: docker.io/library/mine:1\nLoaded image: docker.io/library/packed:latest\n",
    );
}

#[test]
fn what_cannot_be_imported_is_said_and_leaves_the_store_alone() {
    let (root, _) = root();
    let before = contents(&root);
    let tar = file(&root, "app.tar");
    root.output(&["save", "-o", &tar, "app:1"]).printed("");
    root.output(&["import", &tar])
        .refused(1, &["archive of images", "podvisor load"]);
    let empty = root.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let empty = empty.to_str().unwrap();
    root.output(&["import", empty]).refused(1, &["no files"]);
    root.output(&["import", "-"]).refused(1, &["no files"]);
    root.output(&["import", "/no/such"])
        .refused(1, &["cannot open /no/such"]);
    root.output(&["import", "https://example.org/x.tar"])
        .refused(
            1,
            &["curl -fL https://example.org/x.tar | podvisor import -"],
        );
    root.output(&["import", empty, "Not A Name"])
        .refused(1, &["Not A Name", "lower case"]);
    root.output(&["import", "/etc/passwd"])
        .refused(1, &["not a tar archive"]);
    let (_master, slave) = terminal();
    let mut command = root.podvisor(&["import", "-"]);
    Ran::new(command.stdin(slave).output().unwrap()).refused(1, &["terminal"]);
    assert!(contents(&root) == before);
}
