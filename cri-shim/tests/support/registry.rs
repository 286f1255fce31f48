//! A registry of a few images, read-only, over plain HTTP on loopback.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use super::image::{Blob, Image};

/// Answers by path.
type Answers = HashMap<String, Blob>;

/// A server that runs as long as the test.
pub(crate) struct Registry {
    address: SocketAddr,
}

impl Registry {
    /// Serves `images`, each under its repository with the tags `1` and `latest`.
    pub(crate) fn serve(images: &[(&str, Image)]) -> Self {
        let mut answers = Answers::new();
        for (repository, image) in images {
            for blob in [&image.config, &image.layer] {
                let path = format!("/v2/{repository}/blobs/{}", blob.digest);
                answers.insert(path, blob.clone());
            }
            for reference in ["1", "latest", image.manifest.digest.as_str()] {
                let path = format!("/v2/{repository}/manifests/{reference}");
                answers.insert(path, image.manifest.clone());
            }
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let answers = Arc::new(answers);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let answers = Arc::clone(&answers);
                // It is not the server's error if a client goes away during the answer.
                thread::spawn(move || drop(answer(&stream, &answers)));
            }
        });
        Self { address }
    }

    /// Where it is.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The name by which an image is pulled from here.
    pub(crate) fn name(&self, repository: &str) -> String {
        format!("{}/{repository}:1", self.address)
    }
}

fn answer(mut stream: &TcpStream, answers: &Answers) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    while lines
        .next()
        .transpose()?
        .is_some_and(|line| !line.is_empty())
    {}
    let mut words = request.split(' ');
    let is_head = words.next() == Some("HEAD");
    let path = words.next().unwrap_or_default();
    // Whose content it is makes no difference here.
    let path = path.split('?').next().unwrap_or_default();
    let nothing = Blob::default();
    let (status, blob) = match answers.get(path) {
        Some(blob) => ("200 OK", blob),
        None if path == "/v2/" => ("200 OK", &nothing),
        None => ("404 Not Found", &nothing),
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {}\r\nContent-Length: {}\r\n\
         Docker-Content-Digest: {}\r\nConnection: close\r\n\r\n",
        blob.media_type,
        blob.bytes.len(),
        blob.digest
    )?;
    if !is_head {
        stream.write_all(&blob.bytes)?;
    }
    stream.flush()
}
