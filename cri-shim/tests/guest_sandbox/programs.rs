//! Programs in a running container: execs, a forwarded port, and who is attached.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use podvisor_cri::sandbox::{RefusalKind, SandboxClient, StdioFds, TerminalSize};
use podvisor_images::Image;
use serde_json::json;

use super::kind;
use super::support::PATIENCE;
use super::support::pod::{Pod, exec, log_text, process, sh};

/// Creates pairs of sockets: files for an attacher, and the test's ends.
fn attacher(with_input: bool) -> (StdioFds, UnixStream, Option<UnixStream>) {
    let (output, stdout) = UnixStream::pair().unwrap();
    let input = with_input.then(|| UnixStream::pair().unwrap());
    let (stdin, feed) = input.map_or((None, None), |(ours, theirs)| (Some(theirs), Some(ours)));
    let files = StdioFds {
        stdin: stdin.map(Into::into),
        stdout: Some(stdout.into()),
        stderr: None,
    };
    (files, output, feed)
}

fn read_exactly(stream: &mut UnixStream, text: &str) {
    let mut bytes = vec![0; text.len()];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(String::from_utf8_lossy(&bytes), text);
}

/// Execs in the container `second`, which runs.
pub(super) async fn execs(sandbox: &SandboxClient) {
    let ran = sh(sandbox, "second", "e1", "cat /name; echo no >&2; exit 3").await;
    let expected = (3, "two\n", "no\n");
    assert_eq!((ran.code, &*ran.stdout, &*ran.stderr), expected);
    let again = sandbox.wait("second", Some("e1")).await.unwrap();
    assert_eq!(again.code, 3);
    assert_eq!(
        kind(sandbox.wait("second", Some("e0")).await),
        RefusalKind::NotFound
    );

    let long: String = (0..100_000).map(|n| format!("{n}\n")).collect();
    let ran = exec(
        sandbox,
        "second",
        "e2",
        process("cat"),
        long.as_bytes(),
        None,
    );
    let ran = ran.await.unwrap();
    assert!(
        ran.stdout == long,
        "{} bytes of {}",
        ran.stdout.len(),
        long.len()
    );

    let size = TerminalSize {
        rows: 11,
        columns: 22,
    };
    let mut terminal = process("stty size; tty");
    terminal.set_terminal(Some(true));
    let ran = exec(sandbox, "second", "e3", terminal, b"", Some(size))
        .await
        .unwrap();
    assert!(ran.stdout.starts_with("11 22\r\n/dev/pts/"), "{ran:?}");

    let mut missing = process("");
    missing.set_args(Some(vec!["no-such-command".into()]));
    let refused = exec(sandbox, "second", "e4", missing, b"", None).await;
    assert_eq!(kind(refused), RefusalKind::CommandNotFound);
    let refused = exec(sandbox, "nobody", "e5", process("true"), b"", None).await;
    assert_eq!(kind(refused), RefusalKind::NotFound);

    confined(sandbox).await;
    port(sandbox).await;
}

/// An exec has no more privileges than the container's own process.
async fn confined(sandbox: &SandboxClient) {
    let same =
        "same() { test \"$(grep $1: /proc/self/status)\" = \"$(grep $1: /proc/1/status)\"; }\n";
    let has = "has() { test \"$(awk \"/^$1:/{print \\$2}\" /proc/self/status)\" = \"$2\"; }\n";
    let begin = format!("{same}{has}has Seccomp 2 || exit 10\n");
    let alike = format!(
        "{begin}for set in Inh Prm Eff Bnd Amb; do same Cap$set || exit 11; done; same NoNewPrivs"
    );
    let alike = format!("{alike} || {{ grep . /proc/self/status /proc/1/status; exit 1; }}");
    let ran = sh(sandbox, "second", "alike", &alike).await;
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    let mut no_new = process(&format!("{begin}has NoNewPrivs 1"));
    no_new.set_no_new_privileges(Some(true));
    let ran = exec(sandbox, "second", "nnp", no_new, b"", None)
        .await
        .unwrap();
    assert_eq!(ran.code, 0);
    let none = "0000000000000000";
    let script = format!("{begin}test $(id -u) = 1000 && has CapEff {none} && has CapBnd {none}");
    let mut user = process(&script);
    let empty = json!({
        "bounding": [], "effective": [], "permitted": [], "inheritable": [], "ambient": [],
    });
    user.set_capabilities(serde_json::from_value(empty).unwrap());
    let app = json!({"uid": 1000, "gid": 1000});
    user.set_user(serde_json::from_value(app).unwrap());
    let ran = exec(sandbox, "second", "user", user, b"", None)
        .await
        .unwrap();
    assert_eq!(ran.code, 0);
}

/// Connects to a port on the guest's loopback.
async fn port(sandbox: &SandboxClient) {
    let server = {
        let sandbox = sandbox.clone();
        let script = "nc -l -p 8080 -e sh -c 'read line; echo you said $line'";
        tokio::spawn(async move { sh(&sandbox, "second", "nc", script).await })
    };
    // There is no listener until the other process has got that far.
    let begin = Instant::now();
    let stream = loop {
        match sandbox.port_forward(8080).await {
            Ok(stream) => break stream,
            Err(error) if error.kind().is_some() && begin.elapsed() < PATIENCE => {}
            Err(error) => panic!("{error:?}"),
        }
    };
    let mut stream = UnixStream::from(stream);
    stream.set_nonblocking(false).unwrap();
    stream.write_all(b"hello\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "you said hello\n");
    assert_eq!(server.await.unwrap().code, 0);
}

/// Several attachers, a rotated log, and the end of the input.
pub(super) async fn attachers(sandbox: &SandboxClient, pod: &Pod, image: &Image) {
    let mut container = pod.container("echo", image, "exec cat");
    (container.stdin, container.stdin_once) = (true, true);
    sandbox.create_container(container).await.unwrap();
    sandbox.start_container("echo").await.unwrap();
    let (files, mut one, feed) = attacher(true);
    sandbox.attach("echo", files).await.unwrap();
    let (files, mut two, _) = attacher(false);
    sandbox.attach("echo", files).await.unwrap();
    let mut feed = feed.unwrap();
    feed.write_all(b"first\nbegun").unwrap();
    read_exactly(&mut one, "first\nbegun");
    read_exactly(&mut two, "first\nbegun");
    // An attacher's output is in the log, except for an incomplete line.
    let (log, old) = (pod.path("echo.log"), pod.path("echo.old.log"));
    fs::rename(&log, &old).unwrap();
    sandbox
        .reopen_log("echo", pod.open_log("echo"))
        .await
        .unwrap();
    feed.write_all(b" and ended\nlast\n").unwrap();
    drop(feed);
    assert_eq!(sandbox.wait("echo", None).await.unwrap().code, 0);
    let mut rest = String::new();
    two.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, " and ended\nlast\n");
    assert_eq!(log_text(&old), "stdout F first\n");
    assert_eq!(pod.log("echo"), "stdout F begun and ended\nstdout F last\n");
    sandbox.delete_container("echo").await.unwrap();
}
