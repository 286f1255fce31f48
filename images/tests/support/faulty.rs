//! A registry that behaves as a test wants: lies, stalls, disconnects.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};

use podvisor_images::Digest;

use super::TestImage;

/// A request with the fields that tests use. Header names are in lower case.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub headers: HashMap<String, String>,
    pub body: String,
}

impl Request {
    /// First byte requested.
    pub fn range(&self) -> Option<usize> {
        self.headers
            .get("range")?
            .strip_prefix("bytes=")?
            .strip_suffix('-')?
            .parse()
            .ok()
    }
}

pub enum Body {
    Bytes(Vec<u8>),
    /// All of it is announced, but only that many bytes are sent.
    Cut(Vec<u8>, usize),
    /// As `Cut`, but the connection stays open until the server ends.
    Stall(Vec<u8>, usize),
    /// The same bytes repeatedly, in chunks, until the client disconnects.
    Endless(Vec<u8>),
    /// In chunks, without a length.
    Chunked(Vec<u8>),
    /// Until the connection ends, without a length.
    Unsized(Vec<u8>),
}

pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Body,
}

impl Reply {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: Body::Bytes(body.into()),
        }
    }

    pub fn ok(body: Body) -> Self {
        Self {
            status: 200,
            headers: Vec::new(),
            body,
        }
    }

    pub fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }
}

type Handler = dyn Fn(&Request) -> Option<Reply> + Send + Sync;

/// Serves an image, but asks `handler` first.
pub struct Faulty {
    pub host: String,
    pub requests: Arc<Mutex<Vec<Request>>>,
    /// Open connections wait for its end.
    stop: Arc<Mutex<Option<std::sync::mpsc::Sender<()>>>>,
}

impl Faulty {
    pub fn serve(
        image: TestImage,
        handler: impl Fn(&Request) -> Option<Reply> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (sender, stopped) = std::sync::mpsc::channel::<()>();
        let stopped = Arc::new(Mutex::new(stopped));
        let handler: Arc<Handler> = Arc::new(handler);
        std::thread::spawn({
            let requests = Arc::clone(&requests);
            move || {
                for stream in listener.incoming().flatten() {
                    let (image, handler) = (image.clone(), Arc::clone(&handler));
                    let (requests, stopped) = (Arc::clone(&requests), Arc::clone(&stopped));
                    std::thread::spawn(move || {
                        answer(stream, &image, &*handler, &requests, &stopped)
                    });
                }
            }
        });
        Self {
            host,
            requests,
            stop: Arc::new(Mutex::new(Some(sender))),
        }
    }

    pub fn name(&self) -> String {
        format!("{}/app:v1", self.host)
    }

    pub fn paths(&self) -> Vec<String> {
        self.requests
            .lock()
            .unwrap()
            .iter()
            .map(|request| request.path.clone())
            .collect()
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        self.stop.lock().unwrap().take();
    }
}

fn answer(
    mut stream: TcpStream,
    image: &TestImage,
    handler: &Handler,
    requests: &Mutex<Vec<Request>>,
    stopped: &Mutex<Receiver<()>>,
) {
    let Some(request) = read(&stream) else { return };
    requests.lock().unwrap().push(request.clone());
    let reply = handler(&request).unwrap_or_else(|| honest(&request, image));
    let mut head = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    match &reply.body {
        Body::Bytes(bytes) | Body::Cut(bytes, _) | Body::Stall(bytes, _) => {
            head.push_str(&format!("Content-Length: {}\r\n\r\n", bytes.len()));
        }
        Body::Unsized(_) => head.push_str("\r\n"),
        Body::Endless(_) | Body::Chunked(_) => head.push_str("Transfer-Encoding: chunked\r\n\r\n"),
    }
    let _ = stream.write_all(head.as_bytes());
    if request.method == "HEAD" {
        return;
    }
    let chunk =
        |bytes: &[u8]| [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat();
    match &reply.body {
        Body::Bytes(bytes) | Body::Unsized(bytes) => drop(stream.write_all(bytes)),
        Body::Cut(bytes, length) => drop(stream.write_all(&bytes[..*length])),
        Body::Stall(bytes, length) => {
            let _ = stream.write_all(&bytes[..*length]);
            // Until the server ends.
            let _ = stopped.lock().unwrap().recv();
        }
        Body::Chunked(bytes) => {
            let _ = stream.write_all(&[chunk(bytes), b"0\r\n\r\n".to_vec()].concat());
        }
        Body::Endless(bytes) => {
            let chunk = chunk(bytes);
            while stream.write_all(&chunk).is_ok() {}
        }
    }
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream);
    let mut line = String::new();
    lines.read_line(&mut line).ok()?;
    let mut words = line.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        lines.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let length = headers
        .get("content-length")
        .and_then(|length| length.parse().ok())
        .unwrap_or(0);
    let mut body = vec![0; length];
    std::io::Read::read_exact(&mut lines, &mut body).ok()?;
    Some(Request {
        method,
        path,
        headers,
        body: String::from_utf8(body).ok()?,
    })
}

/// The answers of a good registry.
pub fn honest(request: &Request, image: &TestImage) -> Reply {
    let path = request.path.split('?').next().unwrap();
    if path.starts_with("/v2/app/manifests/") {
        return Reply::new(200, image.manifest.clone())
            .header("Content-Type", "application/vnd.oci.image.manifest.v1+json")
            .header("Docker-Content-Digest", image.digest().to_string());
    }
    let blob = path.strip_prefix("/v2/app/blobs/").and_then(|digest| {
        image
            .blobs()
            .find(|blob| Digest::of(blob).to_string() == digest)
            .map(<[u8]>::to_vec)
    });
    match (blob, request.range()) {
        (None, _) => Reply::new(404, "{}"),
        (Some(blob), None) => Reply::new(200, blob),
        (Some(blob), Some(from)) => Reply::new(206, blob[from..].to_vec()).header(
            "Content-Range",
            format!("bytes {from}-{}/{}", blob.len() - 1, blob.len()),
        ),
    }
}
