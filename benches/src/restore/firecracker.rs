//! Firecracker, by its API: the same guest booted to its agent's first answer, snapshotted, and
//! cloned.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::agent;
use crate::boot::{Kind, Running, Sample, Stage, take};

/// The time limit for anything that Firecracker or its guest does, also on an emulated host.
const PATIENCE: Duration = Duration::from_secs(120);
/// The interval between two attempts where no event can be waited for.
const PAUSE: Duration = Duration::from_micros(100);
const GUEST_CID: u32 = 3;

#[derive(Debug)]
pub(super) struct Firecracker {
    program: PathBuf,
    directory: PathBuf,
    kernel: PathBuf,
    initramfs: PathBuf,
    memory_mib: u64,
    cmdline: String,
}

/// A running Firecracker, and its API socket.
struct Api {
    process: Running,
    socket: UnixStream,
    began: Instant,
}

impl Firecracker {
    pub(super) fn stage(
        program: &Path,
        stage: &Stage,
        [kernel, initramfs]: [PathBuf; 2],
        memory_mib: u64,
        cmdline: &str,
    ) -> Result<Self> {
        Ok(Self {
            program: stage.copy(program)?,
            directory: stage.path().to_owned(),
            kernel,
            initramfs,
            memory_mib,
            cmdline: cmdline.to_owned(),
        })
    }

    /// Boots until the agent's first answer.
    pub(super) fn boot(&self) -> Result<Sample> {
        let (api, sample) = self.booted()?;
        drop(api);
        Ok(sample)
    }

    /// Boots, and leaves a snapshot for [`Self::restore`].
    pub(super) fn snapshot(&self) -> Result<()> {
        let (mut api, _) = self.booted()?;
        api.request("PATCH", "/vm", &json!({ "state": "Paused" }))?;
        let files = json!({
            "snapshot_type": "Full",
            "snapshot_path": self.path("state"),
            "mem_file_path": self.path("memory"),
        });
        api.request("PUT", "/snapshot/create", &files)
    }

    /// Clones until the agent's first answer.
    pub(super) fn restore(&self) -> Result<Sample> {
        let mut api = self.start()?;
        let files = json!({
            "snapshot_path": self.path("state"),
            "mem_backend": { "backend_type": "File", "backend_path": self.path("memory") },
            "resume_vm": true,
        });
        api.request("PUT", "/snapshot/load", &files)?;
        self.sample(&api)
    }

    fn booted(&self) -> Result<(Api, Sample)> {
        let mut api = self.start()?;
        let ready = UnixListener::bind(self.path(&format!("vsock_{}", agent::READY_PORT)))?;
        let machine = json!({ "vcpu_count": 1, "mem_size_mib": self.memory_mib });
        api.request("PUT", "/machine-config", &machine)?;
        let source = json!({
            "kernel_image_path": self.kernel,
            "initrd_path": self.initramfs,
            "boot_args": self.cmdline,
        });
        api.request("PUT", "/boot-source", &source)?;
        let vsock = json!({ "guest_cid": GUEST_CID, "uds_path": self.path("vsock") });
        api.request("PUT", "/vsock", &vsock)?;
        api.request("PUT", "/entropy", &json!({}))?;
        let start = json!({ "action_type": "InstanceStart" });
        api.request("PUT", "/actions", &start)?;
        let (mut line, _) = ready.accept()?;
        line.read_to_end(&mut Vec::new())?;
        let sample = self.sample(&api)?;
        Ok((api, sample))
    }

    /// Starts a process and waits until its API accepts connections.
    fn start(&self) -> Result<Api> {
        for name in ["api", "vsock", &format!("vsock_{}", agent::READY_PORT)] {
            let _ = fs::remove_file(self.path(name));
        }
        let messages = self.path("firecracker.messages");
        let began = Instant::now();
        let mut process = Running(
            Command::new(&self.program)
                .arg("--api-sock")
                .arg(self.path("api"))
                .stdin(Stdio::null())
                .stdout(File::create(&messages)?)
                .stderr(File::create(&messages)?)
                .spawn()
                .with_context(|| format!("{} cannot be started", self.program.display()))?,
        );
        let socket = retried("its API", &mut process.0, || {
            UnixStream::connect(self.path("api"))
        });
        let socket = socket.with_context(|| {
            let messages = fs::read_to_string(&messages).unwrap_or_default();
            format!("Firecracker says {:?}", messages.trim())
        })?;
        Ok(Api {
            process,
            socket,
            began,
        })
    }

    /// Asks the agent, and samples when it has answered.
    fn sample(&self, api: &Api) -> Result<Sample> {
        let deadline = Instant::now() + PATIENCE;
        // The guest resets a connection that arrives before it knows that it was restored.
        while let Err(error) = self.ask() {
            if Instant::now() > deadline {
                return Err(error.context("the guest's agent did not answer"));
            }
            thread::sleep(PAUSE);
        }
        let elapsed = api.began.elapsed();
        take(
            api.process.0.id(),
            Kind::Firecracker,
            self.memory_mib,
            elapsed,
        )
    }

    fn ask(&self) -> Result<()> {
        let mut stream = UnixStream::connect(self.path("vsock"))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        writeln!(stream, "CONNECT {}", agent::RPC_PORT)?;
        // Byte by byte: the bytes after the line are the agent's.
        let mut answer = Vec::new();
        while answer.last() != Some(&b'\n') {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            answer.extend(byte);
        }
        if !answer.starts_with(b"OK ") {
            bail!("no connection: {}", String::from_utf8_lossy(&answer));
        }
        Ok(agent::call(&mut stream)?)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(format!("firecracker.{name}"))
    }
}

impl Api {
    fn request(&mut self, method: &str, path: &str, body: &Value) -> Result<()> {
        request(&mut self.socket, method, path, body)
    }
}

/// Sends one HTTP/1.1 request, which must succeed.
fn request(socket: &mut UnixStream, method: &str, path: &str, body: &Value) -> Result<()> {
    let body = body.to_string();
    let text = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    socket.write_all(text.as_bytes())?;
    let mut answer = BufReader::new(&*socket);
    let mut status = String::new();
    answer.read_line(&mut status)?;
    let mut len = 0;
    loop {
        let mut line = String::new();
        answer.read_line(&mut line)?;
        let Some((name, value)) = line.split_once(':') else {
            break;
        };
        if name.eq_ignore_ascii_case("content-length") {
            len = value.trim().parse()?;
        }
    }
    let mut text = String::new();
    answer.take(len).read_to_string(&mut text)?;
    let code = status.split(' ').nth(1).unwrap_or_default();
    if !code.starts_with('2') {
        bail!("{method} {path}: {} {text}", status.trim());
    }
    Ok(())
}

/// Tries until it succeeds or the process has ended.
fn retried<T>(
    what: &str,
    process: &mut Child,
    mut attempt: impl FnMut() -> std::io::Result<T>,
) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match attempt() {
            Ok(done) => return Ok(done),
            Err(error) if Instant::now() > deadline => {
                return Err(error).with_context(|| format!("{what} does not answer"));
            }
            Err(_) => {}
        }
        if let Some(status) = process.try_wait()? {
            bail!("it ended ({status}) before {what} answered");
        }
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_carry_json_and_refusals_are_told() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let server = thread::spawn(move || {
            let mut requests = BufReader::new(&theirs);
            let mut seen = Vec::new();
            for answer in [
                "HTTP/1.1 204 No Content\r\nServer: x\r\n\r\n",
                "HTTP/1.1 400 Bad Request\r\nContent-Length: 7\r\n\r\nno such",
            ] {
                let mut request = String::new();
                while !request.ends_with("\r\n\r\n") {
                    requests.read_line(&mut request).unwrap();
                }
                let mut body = [0; 18];
                requests.read_exact(&mut body).unwrap();
                seen.push(request + str::from_utf8(&body).unwrap());
                (&theirs).write_all(answer.as_bytes()).unwrap();
            }
            seen
        });
        let body = json!({ "state": "Paused" });
        request(&mut ours, "PATCH", "/vm", &body).unwrap();
        let error = request(&mut ours, "PUT", "/x", &body).unwrap_err();
        assert_eq!(
            error.to_string(),
            "PUT /x: HTTP/1.1 400 Bad Request no such"
        );
        let seen = server.join().unwrap();
        assert!(seen[0].starts_with("PATCH /vm HTTP/1.1\r\n"), "{seen:?}");
        assert!(seen[0].ends_with("Content-Length: 18\r\n\r\n{\"state\":\"Paused\"}"));
    }
}
