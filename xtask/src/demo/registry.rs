//! A `docker-registry` for the demo on loopback, and a push to it by the OCI distribution
//! specification: each blob in two requests, then the manifest under its tag.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::image::{Blob, Image, MANIFEST_TYPE};
use crate::process::{self, Group};

/// How long the registry may take to start, and to answer a request.
const LIMIT: Duration = Duration::from_secs(30);

/// A running registry, until this is dropped.
#[derive(Debug)]
pub(crate) struct Registry {
    address: SocketAddr,
    #[expect(dead_code, reason = "held: dropping it ends the registry")]
    group: Group,
}

impl Registry {
    /// Starts a registry that stores its data in `directory`, on a free port.
    pub(crate) fn start(directory: &Path) -> Result<Self> {
        fs::create_dir_all(directory)?;
        // The port is free now; if another process takes it meanwhile, the registry does not
        // answer.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let config = directory.join("config.yml");
        let data = serde_json::Value::from(directory.join("data").display().to_string());
        fs::write(
            &config,
            format!(
                "version: 0.1\nlog: {{level: warn}}\nstorage: {{filesystem: {{rootdirectory: {data}}}}}\nhttp: {{addr: \"{address}\"}}\n"
            ),
        )?;
        let log = directory.join("log");
        let output = fs::File::create(&log)?;
        let mut group = Group::spawn(
            process::tied("docker-registry")
                .arg("serve")
                .arg(&config)
                .stdin(Stdio::null())
                .stdout(output.try_clone()?)
                .stderr(output),
        )?;
        let began = Instant::now();
        while request(address, "GET", "/v2/", "", &[]).is_err() {
            if let Some(status) = group.child().try_wait()? {
                let text = fs::read_to_string(&log).unwrap_or_default();
                let last = text.lines().last().unwrap_or_default();
                bail!("docker-registry ended at once ({status}): {last}");
            }
            if began.elapsed() > LIMIT {
                bail!(
                    "docker-registry does not answer on {address}; its log is {}",
                    log.display()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(Self { address, group })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Pushes an image.
    pub(crate) fn push(&self, image: &Image, repository: &str, tag: &str) -> Result<()> {
        let layers = image.layers.iter().map(|layer| &layer.blob);
        for blob in layers.chain([&image.config]) {
            self.push_blob(blob, repository)
                .with_context(|| format!("{} cannot be pushed", blob.digest))?;
        }
        let path = format!("/v2/{repository}/manifests/{tag}");
        request(self.address, "PUT", &path, MANIFEST_TYPE, &image.manifest)?.expect(201)?;
        Ok(())
    }

    fn push_blob(&self, blob: &Blob, repository: &str) -> Result<()> {
        let path = format!("/v2/{repository}/blobs/uploads/");
        let upload = request(self.address, "POST", &path, "", &[])?.expect(202)?;
        let location = upload
            .header("location")
            .context("the registry named no place for the upload")?;
        // Absolute or relative: the path follows this registry's own name.
        let own = format!("http://{}", self.address);
        let path = location.strip_prefix(&own).unwrap_or(location);
        let separator = if path.contains('?') { '&' } else { '?' };
        let path = format!("{path}{separator}digest={}", blob.digest);
        let data = fs::read(&blob.path)?;
        request(
            self.address,
            "PUT",
            &path,
            "application/octet-stream",
            &data,
        )?
        .expect(201)?;
        Ok(())
    }
}

#[derive(Debug)]
struct Response {
    status: u16,
    head: String,
    body: String,
}

impl Response {
    fn parse(text: &str) -> Result<Self> {
        let (head, body) = text
            .split_once("\r\n\r\n")
            .context("the registry's answer has no end of its head")?;
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse().ok())
            .context("the registry's answer has no status")?;
        Ok(Self {
            status,
            head: head.to_owned(),
            body: body.to_owned(),
        })
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.head
            .lines()
            .skip(1)
            .filter_map(|line| line.split_once(':'))
            .find(|(header, _)| header.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.trim())
    }

    fn expect(self, status: u16) -> Result<Self> {
        if self.status != status {
            bail!(
                "the registry answered {}: {}",
                self.status,
                self.body.trim()
            );
        }
        Ok(self)
    }
}

/// Sends one HTTP request on its own connection; `content_type` is both sent and accepted.
fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    content_type: &str,
    body: &[u8],
) -> Result<Response> {
    let mut stream = TcpStream::connect_timeout(&address, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    let mut head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {}\r\n",
        body.len()
    );
    if !content_type.is_empty() {
        head.push_str(&format!(
            "Content-Type: {content_type}\r\nAccept: {content_type}\r\n"
        ));
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Response::parse(&String::from_utf8_lossy(&answer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::TempDir;

    #[test]
    fn what_was_pushed_can_be_fetched() {
        let directory = TempDir::new("registry").unwrap();
        let image = super::super::image::make(&directory.path().join("image"), "hello").unwrap();
        let registry = Registry::start(&directory.path().join("registry")).unwrap();
        registry.push(&image, "test/image", "1").unwrap();

        let get = |path: &str| {
            request(registry.address, "GET", path, MANIFEST_TYPE, &[])
                .unwrap()
                .expect(200)
                .unwrap()
                .body
        };
        let manifest = get("/v2/test/image/manifests/1");
        assert_eq!(manifest.as_bytes(), image.manifest);
        assert_eq!(image.layers.len(), 3);
        let config = get(&format!("/v2/test/image/blobs/{}", image.config.digest));
        assert!(config.contains("\"diff_ids\""));
    }

    #[test]
    fn an_answer_gives_its_status_headers_and_body() {
        let text = "HTTP/1.1 202 Accepted\r\nLocation: /v2/x?_state=1\r\n\r\nbody";
        let response = Response::parse(text).unwrap();
        assert_eq!(response.header("location"), Some("/v2/x?_state=1"));
        assert_eq!(response.header("digest"), None);
        let error = response.expect(201).unwrap_err().to_string();
        assert_eq!(error, "the registry answered 202: body");
        assert!(Response::parse("nonsense").is_err());
    }
}
