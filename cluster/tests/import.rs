//! `podvisor-cluster import` as a process, on files, with a real server for its sources.

#[path = "import/files.rs"]
mod files;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use files::{Body, Files, Reply, content, qcow2, run_program, sha256};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// How long something may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// A claim with a file system, and what the kubelet gives the container besides.
struct Claim {
    directory: TempDir,
    outside: TempDir,
}

impl Claim {
    fn new() -> Self {
        let claim = Self {
            directory: TempDir::new().unwrap(),
            outside: TempDir::new().unwrap(),
        };
        fs::write(claim.log(), "").unwrap();
        claim
    }

    fn log(&self) -> PathBuf {
        self.outside.path().join("log")
    }

    fn command(&self, size: u64, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_podvisor-cluster"));
        command
            .arg("import")
            .arg(format!("--size={size}"))
            .arg(format!("--directory={}", self.directory.path().display()))
            .arg(format!("--termination-log={}", self.log().display()))
            .args(args)
            .env_clear()
            .env("RUST_LOG", "debug")
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        command
    }

    fn import(&self, size: u64, args: &[&str]) -> Output {
        self.command(size, args).output().unwrap()
    }

    /// Imports; all that is left is the disk.
    fn filled(&self, size: u64, args: &[&str]) -> Vec<u8> {
        let output = self.import(size, args);
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {log}");
        assert_eq!(self.names(), ["disk.img"], "{args:?}");
        fs::read(self.disk()).unwrap()
    }

    /// Imports in vain; returns the termination message.
    fn refused(&self, size: u64, args: &[&str]) -> String {
        let output = self.import(size, args);
        assert!(!output.status.success(), "{args:?} is imported");
        assert!(!self.disk().exists(), "{args:?}: there is a disk");
        let message = fs::read_to_string(self.log()).unwrap();
        assert!(!message.is_empty() && message.len() < 4096, "{message}");
        message
    }

    fn disk(&self) -> PathBuf {
        self.directory.path().join("disk.img")
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.directory.path()).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }
}

/// What was served, grown to the size of the disk.
fn grown(mut content: Vec<u8>, size: u64) -> Vec<u8> {
    content.resize(usize::try_from(size).unwrap(), 0);
    content
}

fn allocated(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn an_empty_disk_has_the_size_that_was_asked_for() {
    let claim = Claim::new();
    let disk = claim.filled(8 * MIB, &["--blank"]);
    assert!(disk == vec![0; 8 << 20]);
    assert!(allocated(&claim.disk()) < MIB);
    let claim = Claim::new();
    claim.filled(8 * MIB, &["--blank", "--preallocate"]);
    assert!(allocated(&claim.disk()) >= 8 * MIB);
}

#[test]
fn a_file_of_any_form_becomes_the_same_disk() {
    let raw = content(4 * MIB);
    let other = TempDir::new().unwrap();
    let path = other.path().join("disk");
    fs::write(&path, &raw).unwrap();
    let packed = |program: &str| run_program(Command::new(program).arg("-c").arg(&path));
    let forms = [
        raw.clone(),
        packed("gzip"),
        packed("xz"),
        qcow2(&path, &[]),
        qcow2(&path, &["-c"]),
    ];
    for form in forms {
        let server = Files::serve(move |_| Reply::of(form.clone()));
        let claim = Claim::new();
        let url = format!("--url={}", server.url("disk.anything"));
        assert!(claim.filled(16 * MIB, &[&url]) == grown(raw.clone(), 16 * MIB));
        assert!(allocated(&claim.disk()) < 8 * MIB, "zeros are holes");
    }
}

#[test]
fn a_copy_has_what_its_source_has_and_no_more_space() {
    let raw = content(4 * MIB);
    let source = TempDir::new().unwrap();
    let path = source.path().join("disk.img");
    fs::write(&path, &raw).unwrap();
    let file = format!("--file={}", path.display());
    let claim = Claim::new();
    assert!(claim.filled(8 * MIB, &[&file]) == grown(raw.clone(), 8 * MIB));
    assert!(allocated(&claim.disk()) < 3 * MIB, "zeros are holes");
    assert!(fs::read(&path).unwrap() == raw, "the source is as it was");
    let message = Claim::new().refused(2 * MIB, &[&file]);
    assert!(message.contains("ask for a larger claim"), "{message}");
    fs::remove_file(&path).unwrap();
    let message = Claim::new().refused(8 * MIB, &[&file]);
    assert!(message.contains("disk.img"), "{message}");
}

#[test]
fn a_disk_of_an_image_is_found() {
    let raw = content(2 * MIB);
    let server = Files::serve(files::registry("app/vm", "disk/any-name", raw.clone()));
    let claim = Claim::new();
    let image = format!("--image={}/app/vm:v1", server.host);
    assert!(claim.filled(4 * MIB, &[&image]) == grown(raw.clone(), 4 * MIB));
    let claim = Claim::new();
    let scratch = TempDir::new().unwrap();
    let at = format!("--scratch={}", scratch.path().display());
    assert!(claim.filled(4 * MIB, &[&image, &at]) == grown(raw, 4 * MIB));
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);

    let without = Files::serve(files::registry("app/vm", "etc/passwd", vec![1; 512]));
    let image = format!("--image={}/app/vm:v1", without.host);
    let message = Claim::new().refused(4 * MIB, &[&image]);
    assert!(message.contains("has no disk"), "{message}");
}

#[test]
fn hostile_and_wrong_sources_are_refused_with_a_reason() {
    let other = TempDir::new().unwrap();
    let file = |name: &str, size: u64| {
        let path = other.path().join(name);
        fs::write(&path, content(size)).unwrap();
        path
    };
    let large = file("large", 6 * MIB);
    let overlay = other.path().join("overlay");
    run_program(Command::new("qemu-img").args([
        "create",
        "-q",
        "-fqcow2",
        "-Fraw",
        &format!("-b{}", large.display()),
        &overlay.to_string_lossy(),
    ]));
    let bomb = {
        let zeros = other.path().join("zeros");
        fs::File::create(&zeros).unwrap().set_len(64 << 20).unwrap();
        run_program(Command::new("gzip").arg("-c").arg(&zeros))
    };
    let sum = format!("--checksum={}", sha256(b"another"));
    let too_large = "virtual image size is larger than the reported available storage";
    let cases: Vec<(Reply, Vec<String>, &str)> = vec![
        (Reply::of(fs::read(&large).unwrap()), vec![], too_large),
        (Reply::of(qcow2(&large, &[])), vec![], too_large),
        (Reply::of(bomb), vec![], too_large),
        (Reply::new(200, Body::Endless), vec![], too_large),
        (
            Reply::of(fs::read(&overlay).unwrap()),
            vec![],
            "backing file",
        ),
        (Reply::of(b"KDMV....".to_vec()), vec![], "VMDK"),
        (Reply::of(Vec::new()), vec![], "empty"),
        (Reply::of(content(MIB)), vec![sum], "checksum"),
        (
            Reply::new(404, Body::Bytes(Vec::new())),
            vec![],
            "there is no",
        ),
        (
            Reply::new(401, Body::Bytes(Vec::new())),
            vec![],
            "does not allow",
        ),
        (Reply::redirect("file:///etc/passwd"), vec![], "refused"),
        (Reply::redirect("ftp://127.0.0.1/x"), vec![], "refused"),
    ];
    for (reply, more, expected) in cases {
        let server = Files::serve(move |_| reply.clone());
        let url = format!("--url={}", server.url("disk"));
        let mut args = vec![url.as_str()];
        args.extend(more.iter().map(String::as_str));
        let message = Claim::new().refused(4 * MIB, &args);
        assert!(message.contains(expected), "{expected}: {message}");
    }
    let message = Claim::new().refused(4 * MIB, &["--url=http://127.0.0.1:1/x"]);
    assert!(message.contains("cannot reach"), "{message}");
}

#[test]
fn exactly_as_large_is_not_too_large() {
    let raw = content(4 * MIB);
    let server = {
        let raw = raw.clone();
        Files::serve(move |_| Reply::of(raw.clone()))
    };
    let url = format!("--url={}", server.url("disk"));
    assert!(Claim::new().filled(4 * MIB, &[&url]) == raw);
}

#[test]
fn a_secret_is_sent_and_never_shown() {
    let server = Files::serve(|request| {
        match request.header("authorization") {
            // me:pa/ss
            Some("Basic bWU6cGEvc3M=") => Reply::of(content(MIB)),
            _ => Reply::new(401, Body::Bytes(Vec::new())),
        }
    });
    let url = format!("--url={}", server.url("disk"));
    let claim = Claim::new();
    let run = |password: &str| {
        claim
            .command(4 * MIB, &[&url])
            .env("IMPORTER_ACCESS_KEY_ID", "me")
            .env("IMPORTER_SECRET_KEY", password)
            .output()
            .unwrap()
    };
    let wrong = run("no-such-secret");
    assert!(!wrong.status.success());
    let told = fs::read_to_string(claim.log()).unwrap();
    assert!(told.contains("does not allow"), "{told}");
    let right = run("pa/ss");
    assert!(right.status.success());
    for output in [&wrong, &right] {
        let log = String::from_utf8_lossy(&output.stderr);
        for secret in ["no-such-secret", "pa/ss", "pa%2Fss"] {
            assert!(!log.contains(secret) && !told.contains(secret), "{log}");
        }
    }
}

#[test]
fn a_connection_that_breaks_is_continued() {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let raw = content(4 * MIB);
    let server = {
        let raw = raw.clone();
        Files::serve(move |request| {
            if COUNT.fetch_add(1, Ordering::SeqCst) == 0 {
                let tagged = Reply::new(200, Body::Cut(raw.clone(), 2 << 20));
                return tagged.header("ETag", "\"a\"");
            }
            let from = request.range().unwrap_or(0);
            let rest = raw[from..].to_vec();
            let range = format!("bytes {from}-{}/{}", raw.len() - 1, raw.len());
            Reply::new(206, Body::Bytes(rest))
                .header("Content-Range", &range)
                .header("ETag", "\"a\"")
        })
    };
    let url = format!("--url={}", server.url("disk"));
    assert!(Claim::new().filled(4 * MIB, &[&url]) == raw);
    assert!(COUNT.load(Ordering::SeqCst) >= 2);
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// Asks an importer for its metrics until they have `wanted`.
fn progress(port: u16, wanted: &str) -> String {
    let deadline = Instant::now() + LIMIT;
    loop {
        let text = files::get(port, "/metrics").unwrap_or_default();
        if text.contains(wanted) {
            return text;
        }
        assert!(Instant::now() < deadline, "{wanted}: {text}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_killed_import_leaves_no_disk_and_begins_again() {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let raw = content(4 * MIB);
    let server = {
        let raw = raw.clone();
        Files::serve(move |_| match COUNT.fetch_add(1, Ordering::SeqCst) {
            0 => Reply::new(200, Body::Stall(raw.clone(), 3 << 20)),
            _ => Reply::of(raw.clone()),
        })
    };
    let claim = Claim::new();
    let (url, port) = (format!("--url={}", server.url("disk")), free_port());
    let at = format!("--progress=127.0.0.1:{port}");
    let args = [url.as_str(), &at, "--owner=u-1"];
    let mut first = Running(claim.command(4 * MIB, &args).spawn().unwrap());
    let told = progress(port, "} 75.");
    let sample = "kubevirt_cdi_import_progress_total{ownerUID=\"u-1\"} 75.00";
    assert!(told.contains(sample), "{told}");
    first.0.kill().unwrap();
    first.0.wait().unwrap();
    assert_eq!(claim.names(), [".podvisor-import"]);
    assert!(claim.filled(4 * MIB, &[&url]) == raw);
}

#[test]
fn an_import_ends_when_it_is_told_to() {
    let server = Files::serve(|_| Reply::new(200, Body::Stall(content(MIB), 1000)));
    let claim = Claim::new();
    let (url, port) = (format!("--url={}", server.url("disk")), free_port());
    let at = format!("--progress=127.0.0.1:{port}");
    let mut running = Running(claim.command(4 * MIB, &[&url, &at]).spawn().unwrap());
    progress(port, "} 0.00");
    let pid = running.0.id().to_string();
    assert!(Command::new("kill").arg(&pid).status().unwrap().success());
    assert_eq!(running.0.wait().unwrap().code(), Some(1));
    let message = fs::read_to_string(claim.log()).unwrap();
    assert!(message.contains("told to end"), "{message}");
}
