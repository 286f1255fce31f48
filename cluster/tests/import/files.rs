//! A small web server, a small registry, and disk images.

#![allow(unreachable_pub, reason = "a module of a test program")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use sha2::{Digest as _, Sha256};

/// What a client asks for.
pub struct Request {
    pub path: String,
    headers: Vec<(String, String)>,
}

impl Request {
    /// A header's value; names are in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The first byte that is asked for.
    pub fn range(&self) -> Option<usize> {
        let range = self.header("range")?.strip_prefix("bytes=")?;
        range.strip_suffix('-')?.parse().ok()
    }
}

#[derive(Clone)]
pub enum Body {
    Bytes(Vec<u8>),
    /// All is announced, and so many bytes are sent.
    Cut(Vec<u8>, usize),
    /// As `Cut`, but the connection stays open.
    Stall(Vec<u8>, usize),
    /// In chunks, without an end.
    Endless,
}

#[derive(Clone)]
pub struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Body,
}

impl Reply {
    pub fn of(bytes: Vec<u8>) -> Self {
        Self::new(200, Body::Bytes(bytes))
    }

    pub fn new(status: u16, body: Body) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body,
        }
    }

    pub fn redirect(target: &str) -> Self {
        Self::new(302, Body::Bytes(Vec::new())).header("Location", target)
    }

    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }
}

/// A server on loopback, until the program ends.
pub struct Files {
    pub host: String,
}

impl Files {
    pub fn serve(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let answer = Arc::new(answer);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let answer = Arc::clone(&answer);
                std::thread::spawn(move || {
                    // A client may leave at any time.
                    let _ = speak(&stream, &*answer);
                });
            }
        });
        Self { host }
    }

    pub fn url(&self, name: &str) -> String {
        format!("http://{}/{name}", self.host)
    }
}

fn speak(stream: &TcpStream, answer: &dyn Fn(&Request) -> Reply) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let mut headers = Vec::new();
    while let Some(line) = lines.next().transpose()? {
        let Some((name, value)) = line.split_once(": ") else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let reply = answer(&Request { path, headers });
    let mut head = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    let mut stream = stream;
    let (bytes, end) = match &reply.body {
        Body::Endless => {
            head.push_str("Transfer-Encoding: chunked\r\n\r\n");
            stream.write_all(head.as_bytes())?;
            let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x1_0000));
            loop {
                stream.write_all(chunk.as_bytes())?;
            }
        }
        Body::Bytes(bytes) => (bytes, bytes.len()),
        Body::Cut(bytes, end) | Body::Stall(bytes, end) => (bytes, *end),
    };
    head.push_str(&format!("Content-Length: {}\r\n\r\n", bytes.len()));
    stream.write_all(head.as_bytes())?;
    stream.write_all(&bytes[..end])?;
    if matches!(reply.body, Body::Stall(..)) {
        // Until the client leaves.
        let _ = stream.read(&mut [0; 1])?;
    }
    Ok(())
}

/// Asks a server on loopback; returns the whole answer.
pub fn get(port: u16, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

pub fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// Answers as a registry that has one image with one file.
pub fn registry(
    name: &str,
    file: &str,
    bytes: Vec<u8>,
) -> impl Fn(&Request) -> Reply + Send + Sync + 'static {
    let layer = tar(file, &bytes);
    let config = json!({
        "os": "linux", "architecture": "amd64", "config": {},
        "rootfs": {"type": "layers", "diff_ids": [sha256(&layer)]},
    });
    let config = config.to_string().into_bytes();
    let kind = |of: &str| format!("application/vnd.oci.image.{of}");
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": kind("manifest.v1+json"),
        "config": {
            "mediaType": kind("config.v1+json"), "digest": sha256(&config), "size": config.len(),
        },
        "layers": [{
            "mediaType": kind("layer.v1.tar"), "digest": sha256(&layer), "size": layer.len(),
        }],
    });
    let manifest = manifest.to_string().into_bytes();
    let base = format!("/v2/{name}");
    let blobs = [config, layer].map(|blob| (format!("{base}/blobs/{}", sha256(&blob)), blob));
    move |request| {
        let path = request.path.as_str();
        if path == "/v2/" {
            return Reply::of(b"{}".to_vec());
        }
        if path.starts_with(&format!("{base}/manifests/")) {
            return Reply::of(manifest.clone())
                .header("Content-Type", "application/vnd.oci.image.manifest.v1+json")
                .header("Docker-Content-Digest", &sha256(&manifest));
        }
        match blobs.iter().find(|(known, _)| known == path) {
            Some((_, blob)) => Reply::of(blob.clone()),
            None => Reply::new(404, Body::Bytes(Vec::new())),
        }
    }
}

/// A tar archive with one file.
fn tar(name: &str, bytes: &[u8]) -> Vec<u8> {
    let mut header = [0; 512];
    let mut put =
        |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, name);
    put(100, "0000644\0");
    put(108, "0000000\0");
    put(116, "0000000\0");
    put(124, &format!("{:011o}\0", bytes.len()));
    put(136, "00000000000\0");
    put(148, "        ");
    put(156, "0");
    put(257, "ustar\0");
    put(263, "00");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut archive = header.to_vec();
    archive.extend_from_slice(bytes);
    archive.resize(archive.len().next_multiple_of(512) + 1024, 0);
    archive
}

/// A disk with data and zeros.
pub fn content(size: u64) -> Vec<u8> {
    let size = usize::try_from(size).unwrap();
    let mut disk = vec![0; size];
    for (index, byte) in disk.iter_mut().enumerate() {
        if (index >> 16).is_multiple_of(3) {
            *byte = (index % 251) as u8;
        }
    }
    disk
}

/// A raw disk as a qcow2 file.
pub fn qcow2(raw: &Path, options: &[&str]) -> Vec<u8> {
    let target = raw.with_extension("qcow2");
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-q", "-fraw", "-Oqcow2"]);
    run_program(command.args(options).arg(raw).arg(&target));
    std::fs::read(target).unwrap()
}

/// Runs a program to its good end; returns its output.
pub fn run_program(command: &mut Command) -> Vec<u8> {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {output:?}");
    output.stdout
}
