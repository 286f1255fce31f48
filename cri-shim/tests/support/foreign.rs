//! Images created by other tools: `cargo xtask test` provides them and passes their directory.

use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::PATIENCE;

/// Returns the path of one of the images' files.
pub(crate) fn path(name: &str) -> PathBuf {
    let directory = std::env::var_os("PODVISOR_TEST_IMAGES").expect(
        "PODVISOR_TEST_IMAGES names no directory: `cargo xtask test --only guest` makes the images",
    );
    let path = PathBuf::from(directory).join(name);
    assert!(path.exists(), "{} is missing", path.display());
    path
}

/// Debian's docker-registry on loopback with those images, read-only; it ends when this is dropped.
pub(crate) struct Registry {
    child: Child,
    port: u16,
    _dir: TempDir,
}

impl Registry {
    pub(crate) fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let config = dir.path().join("config.yml");
        let settings = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {:?}}}, \
             maintenance: {{readonly: {{enabled: true}}}}}}\nhttp: {{addr: \"127.0.0.1:{port}\"}}\n",
            path("registry/data")
        );
        fs::write(&config, settings).unwrap();
        let mut child = Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("docker-registry is needed: apt-get install docker-registry");
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            let ended = child.try_wait().unwrap();
            assert!(ended.is_none(), "docker-registry ended: {ended:?}");
            assert!(Instant::now() < deadline, "docker-registry does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
        Self {
            child,
            port,
            _dir: dir,
        }
    }

    /// Returns the name by which an image is pulled from here.
    pub(crate) fn name(&self, repository: &str) -> String {
        format!("127.0.0.1:{}/{repository}:1", self.port)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
