//! What clients and volumes may do to the program.

use std::os::unix::fs::symlink;

use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::*;

/// The program with one volume, `disk`, and its files.
struct Scene {
    directory: TempDir,
    certificate: CertificateDer<'static>,
    listener: Option<TcpListener>,
    options: Options,
    stop: Option<oneshot::Sender<()>>,
    served: Option<tokio::task::JoinHandle<()>>,
}

impl Scene {
    async fn new(disk: &[u8]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("tls.crt"), own.cert.pem()).unwrap();
        std::fs::write(at("tls.key"), own.signing_key.serialize_pem()).unwrap();
        std::fs::write(at("token"), "secret").unwrap();
        std::fs::write(at("disk.img"), disk).unwrap();
        std::fs::create_dir(at("dumps")).unwrap();
        std::fs::write(at("dumps/vm.memory.dump"), disk).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let options = Options {
            volumes: vec![Volume {
                name: "disk".to_owned(),
                path: at("disk.img"),
            }],
            files: vec![Volume {
                name: "dumps".to_owned(),
                path: directory.path().join("dumps"),
            }],
            listen: listener.local_addr().unwrap(),
            token: at("token"),
            credentials: directory.path().to_owned(),
            until: 0,
            termination_log: at("log"),
        };
        Self {
            certificate: own.cert.der().clone(),
            listener: Some(listener),
            directory,
            options,
            stop: None,
            served: None,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn serve(&mut self) {
        let (stop, stopped) = oneshot::channel::<()>();
        let stopped = async { drop(stopped.await) };
        let (exporter, tls) = prepare(&self.options).unwrap();
        let listener = self.listener.take().unwrap();
        self.served = Some(tokio::spawn(serve_on(listener, tls, exporter, stopped)));
        self.stop = Some(stop);
    }

    async fn connect(&self) -> SendRequest<Empty<Bytes>> {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.clone()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(self.options.listen).await.unwrap();
        let name = "localhost".try_into().unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream);
        let (sender, connection) = handshake(TokioIo::new(stream.await.unwrap()))
            .await
            .unwrap();
        tokio::spawn(connection);
        sender
    }

    async fn ask(&self, method: &str, path: &str) -> Response<Incoming> {
        let request = Request::builder().method(method).uri(path);
        let request = request
            .header("host", "localhost")
            .header(TOKEN_HEADER, "secret");
        let request = request.body(Empty::new()).unwrap();
        let mut sender = self.connect().await;
        sender.send_request(request).await.unwrap()
    }

    async fn get(&self) -> Response<Incoming> {
        self.ask("GET", "/volumes/disk/disk.img").await
    }
}

async fn text_of(answer: Response<Incoming>) -> (u16, String) {
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8_lossy(&body).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_whose_disk_is_no_disk_is_not_served() {
    let scene = Scene::new(b"disk").await;
    for target in ["/etc/passwd", "/dev/zero", "/gone"] {
        let disk = scene.path("disk.img");
        std::fs::remove_file(&disk).unwrap();
        symlink(target, &disk).unwrap();
        let prepared = prepare(&scene.options).map(drop);
        assert!(
            matches!(prepared, Err(ExportError::Disk { .. })),
            "{target}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_becomes_a_link_is_not_followed() {
    let mut scene = Scene::new(b"disk").await;
    scene.serve();
    assert_eq!(text_of(scene.get().await).await, (200, "disk".to_owned()));
    let disk = scene.path("disk.img");
    std::fs::remove_file(&disk).unwrap();
    symlink(scene.path("token"), &disk).unwrap();
    for path in ["/volumes/disk/disk.img", "/volumes/disk/disk.img.gz"] {
        let (status, text) = text_of(scene.ask("GET", path).await).await;
        assert_eq!(status, 500, "{text}");
        assert!(!text.contains("secret") && text.contains("cannot be opened"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_sent_as_a_packed_archive() {
    let mut scene = Scene::new(b"dump").await;
    symlink(scene.path("token"), scene.path("dumps/link")).unwrap();
    scene.serve();
    let answer = scene.ask("GET", "/volumes/dumps/disk.tar.gz").await;
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.headers()[header::CONTENT_TYPE], "application/gzip");
    let packed = answer.into_body().collect().await.unwrap().to_bytes();
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(&*packed));
    let mut names = Vec::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut content = String::new();
        std::io::Read::read_to_string(&mut entry, &mut content).unwrap();
        names.push((entry.path().unwrap().display().to_string(), content));
    }
    assert_eq!(names, [("vm.memory.dump".to_owned(), "dump".to_owned())]);
    // A disk is no archive, and files are no disk.
    for path in [
        "/volumes/disk/disk.tar.gz",
        "/volumes/dumps/disk.img",
        "/volumes/dumps/disk.img.gz",
    ] {
        assert_eq!(text_of(scene.ask("GET", path).await).await.0, 404, "{path}");
    }
    std::fs::remove_dir_all(scene.path("dumps")).unwrap();
    let answer = scene.ask("GET", "/volumes/dumps/disk.tar.gz").await;
    let (status, text) = text_of(answer).await;
    assert_eq!(status, 500, "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_becomes_shorter_breaks_the_download_off() {
    const LENGTH: u64 = 256 << 20;
    let mut scene = Scene::new(b"").await;
    let disk = File::options().write(true).open(scene.path("disk.img"));
    let disk = disk.unwrap();
    disk.set_len(LENGTH).unwrap();
    scene.serve();
    // Nobody takes the body yet: little of it is read.
    let answer = scene.get().await;
    assert_eq!(answer.headers()[header::CONTENT_LENGTH], LENGTH.to_string());
    disk.set_len(1 << 20).unwrap();
    let mut body = answer.into_body();
    let mut read = 0_u64;
    let ended = loop {
        match body.frame().await {
            Some(Ok(frame)) => read += frame.into_data().unwrap().len() as u64,
            end => break end,
        }
    };
    assert!(matches!(ended, Some(Err(_))), "it ended after {read} bytes");
    assert!(read < LENGTH);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_token_nobody_is_served() {
    let mut scene = Scene::new(b"disk").await;
    scene.serve();
    for token in [Some(""), Some("\n"), None] {
        match token {
            Some(token) => std::fs::write(scene.path("token"), token).unwrap(),
            None => std::fs::remove_file(scene.path("token")).unwrap(),
        }
        let (status, text) = text_of(scene.get().await).await;
        assert_eq!(status, 500);
        assert!(text.contains("look at its Secret"), "{text}");
    }
    std::fs::write(scene.path("token"), "other").unwrap();
    assert_eq!(text_of(scene.get().await).await.0, 401, "it was replaced");
    let (status, text) = text_of(scene.ask("GET", "/healthz").await).await;
    assert_eq!((status, text.as_str()), (200, "ok"));
}

#[tokio::test(flavor = "multi_thread")]
async fn downloads_that_nobody_takes_leave_others_an_answer() {
    let mut scene = Scene::new(b"").await;
    let disk = File::options().write(true).open(scene.path("disk.img"));
    disk.unwrap().set_len(256 << 20).unwrap();
    scene.serve();
    let mut held = Vec::new();
    for _ in 0..MAX_DOWNLOADS {
        let answer = scene.get().await;
        assert_eq!(answer.status(), 200);
        held.push(answer);
    }
    let (status, text) = text_of(scene.get().await).await;
    assert_eq!(status, 503, "{text}");
    // What asks for no body takes no place for long.
    held.pop();
    let again = async {
        while scene.ask("HEAD", "/volumes/disk/disk.img").await.status() != 200 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), again)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn it_ends_when_it_is_told_to() {
    let mut scene = Scene::new(b"disk").await;
    scene.serve();
    drop(scene.stop.take());
    scene.served.take().unwrap().await.unwrap();
    assert!(TcpStream::connect(scene.options.listen).await.is_err());
}

fn asked(headers: &[(HeaderName, &str)], format: Format) -> Option<Range<u64>> {
    let headers = headers.iter().map(|(name, value)| {
        let value = HeaderValue::from_str(value).unwrap();
        (name.clone(), value)
    });
    part(&headers.collect(), format, 10)
}

#[test]
fn parts_of_a_raw_disk_are_sent_and_packed_ones_are_whole() {
    let range = (header::RANGE, "bytes=2-3");
    assert_eq!(asked(&[], Format::Raw), Some(0..10));
    assert_eq!(asked(std::slice::from_ref(&range), Format::Raw), Some(2..4));
    assert_eq!(
        asked(std::slice::from_ref(&range), Format::Gzip),
        Some(0..10)
    );
    let condition = (header::IF_RANGE, "\"a\"");
    assert_eq!(asked(&[range, condition], Format::Raw), Some(0..10));
    assert_eq!(asked(&[(header::RANGE, "bytes=10-")], Format::Raw), None);
}

#[test]
fn an_answer_says_which_part_it_is() {
    let of = |part, format| {
        let answer = describe(&part, format, 10);
        let header = |name| {
            let value = answer.headers().get(name)?;
            Some(value.to_str().unwrap().to_owned())
        };
        let (length, range) = (header("content-length"), header("content-range"));
        (answer.status().as_u16(), length, range)
    };
    assert_eq!(of(0..10, Format::Raw), (200, Some("10".into()), None));
    assert_eq!(
        of(2..4, Format::Raw),
        (206, Some("2".into()), Some("bytes 2-3/10".into()))
    );
    assert_eq!(of(0..10, Format::Gzip), (200, None, None));
}

#[test]
fn the_time_that_is_left_ends_at_once_when_it_is_over() {
    assert_eq!(left(0), Duration::ZERO);
    assert!(left(u64::MAX) > Duration::from_secs(3600));
}
