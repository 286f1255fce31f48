//! A docker-registry on loopback that serves its storage.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// The time limit for a server's start.
const LIMIT: Duration = Duration::from_secs(30);

/// A server in a separate process, which ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
}

impl Server {
    /// Starts a server and waits until `answers` returns true. Its output goes to `log`.
    pub(crate) fn start(
        command: &mut Command,
        log: &Path,
        answers: impl Fn() -> bool,
    ) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let file =
            File::create(log).with_context(|| format!("{} cannot be written", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("{name} cannot be started"))?;
        let mut server = Self { child };
        let began = Instant::now();
        while !answers() {
            if let Some(status) = server.child.try_wait()? {
                let text = fs::read_to_string(log).unwrap_or_default();
                let last = text.lines().last().unwrap_or_default();
                bail!("{name} ended at once ({status}): {last}");
            }
            if began.elapsed() > LIMIT {
                bail!("{name} does not answer; its log is {}", log.display());
            }
            // No event reports that another program's server starts to listen.
            sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // None of them has state to clean up: its directory is removed next.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The registry.
#[derive(Debug)]
pub(crate) struct Registry {
    address: SocketAddr,
    _server: Server,
}

impl Registry {
    /// Serves `storage`, read-only; `directory` is for the registry's own files.
    pub(crate) fn start(storage: &Path, directory: &Path) -> Result<Self> {
        fs::create_dir_all(directory)?;
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let config = directory.join("config.yml");
        let text = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {storage:?}}}, \
             maintenance: {{readonly: {{enabled: true}}}}}}\nhttp: {{addr: \"{address}\"}}\n"
        );
        fs::write(&config, text)?;
        let server = Server::start(
            Command::new("docker-registry").arg("serve").arg(&config),
            &directory.join("log"),
            || TcpStream::connect(address).is_ok(),
        )?;
        Ok(Self {
            address,
            _server: server,
        })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}
