//! A pod and its containers, created as a kubelet does.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use podvisor_cri_messages::*;

use crate::client::{ask, ask_images};
use crate::fixture::RUNTIME;
use crate::support::PATIENCE;

/// Who asks for a pod, which decides how podvisor serves its volumes: a kubelet makes a pod anew if
/// one of them cannot be mounted with mapped users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Client {
    /// The pod's directory is among those of a kubelet.
    Kubelet,
    /// There is none, as for `crictl`: volumes are served as the host's root.
    Other,
}

/// The pods of tests that need a container in any pod of a kubelet, and of another client: each
/// exists until the program ends, or until it stops.
static SHARED: Mutex<[Option<&'static Pod>; 2]> = Mutex::new([None; 2]);

/// Locks the shared pods' slots. A test that failed while it created the pod leaves one empty.
fn shared() -> MutexGuard<'static, [Option<&'static Pod>; 2]> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where kubelets have the directories of their pods.
const KUBELETS_PODS: &str = "/var/lib/kubelet/pods";

#[allow(unsafe_code)]
// SAFETY: as the C library declares it; it may be called at any time.
unsafe extern "C" {
    safe fn atexit(handler: extern "C" fn()) -> std::ffi::c_int;
}

extern "C" fn remove_shared() {
    // In a separate thread: this one's thread-local values are gone by now.
    let removed = thread::spawn(|| {
        for pod in shared().iter_mut().filter_map(Option::take) {
            pod.stop();
            pod.remove();
        }
    });
    // The tests have reported their results.
    let _ = removed.join();
}

/// Names must be unique while their pods exist.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Images that were pulled, by name.
static PULLED: Mutex<Vec<String>> = Mutex::new(Vec::new());

pub(crate) struct Pod {
    pub(crate) id: String,
    pub(crate) config: PodSandboxConfig,
    pub(crate) logs: PathBuf,
}

pub(crate) struct Container {
    pub(crate) id: String,
    log: PathBuf,
}

pub(crate) struct Output {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) fn number() -> u32 {
    NUMBER.fetch_add(1, Ordering::Relaxed)
}

pub(crate) fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

/// Pulls an image once.
pub(crate) fn image(repository: &str) -> ImageSpec {
    let name = RUNTIME.image(repository);
    let spec = ImageSpec {
        image: name.clone(),
        ..Default::default()
    };
    let mut pulled = PULLED.lock().unwrap_or_else(PoisonError::into_inner);
    if !pulled.contains(&name) {
        ask_images!(pull_image(PullImageRequest {
            image: Some(spec.clone()),
            ..Default::default()
        }))
        .unwrap();
        pulled.push(name);
    }
    spec
}

fn directory_of(config: &PodSandboxConfig) -> PathBuf {
    let uid = config.metadata.as_ref().map(|metadata| &*metadata.uid);
    Path::new(KUBELETS_PODS).join(uid.unwrap())
}

impl Pod {
    pub(crate) fn shared() -> &'static Self {
        Self::shared_of(Client::Kubelet)
    }

    /// The shared pod of a client: [`Client::Other`] for volumes without mapped users.
    pub(crate) fn shared_of(client: Client) -> &'static Self {
        let mut shared = shared();
        let is_first = shared.iter().all(Option::is_none);
        let slot = &mut shared[usize::from(client == Client::Other)];
        if let Some(pod) = *slot {
            let status = pod.status();
            if status.is_ok_and(|status| status.state() == PodSandboxState::SandboxReady) {
                return pod;
            }
            // The cause of its end has failed one test, and must not fail all that follow.
            pod.stop();
            pod.remove();
        }
        // It is never dropped, and its machine would outlive runtime and program.
        let pod = &*Box::leak(Box::new(Self::run_for(client, "shared", |_| {})));
        *slot = Some(pod);
        if is_first {
            assert_eq!(atexit(remove_shared), 0);
        }
        pod
    }

    /// Returns the configuration of a pod after `change`.
    pub(crate) fn config(
        name: &str,
        change: impl FnOnce(&mut PodSandboxConfig),
    ) -> PodSandboxConfig {
        let number = number();
        let logs = RUNTIME.directory("logs");
        let mut config = PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: format!("{name}-{number}"),
                uid: format!("conformance-{number}"),
                namespace: "conformance".to_owned(),
                attempt: 0,
            }),
            hostname: format!("{name}-host"),
            log_directory: logs.display().to_string(),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: "/conformance".to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        };
        change(&mut config);
        config
    }

    pub(crate) fn run(name: &str, change: impl FnOnce(&mut PodSandboxConfig)) -> Self {
        Self::run_for(Client::Kubelet, name, change)
    }

    pub(crate) fn run_for(
        client: Client,
        name: &str,
        change: impl FnOnce(&mut PodSandboxConfig),
    ) -> Self {
        let config = Self::config(name, change);
        if client == Client::Kubelet {
            fs::create_dir_all(directory_of(&config)).unwrap();
        }
        Self::of(config)
    }

    /// Returns the directory that its kubelet has for it and its volumes.
    pub(crate) fn directory(&self) -> PathBuf {
        directory_of(&self.config)
    }

    pub(crate) fn of(config: PodSandboxConfig) -> Self {
        let response = ask!(run_pod_sandbox(RunPodSandboxRequest {
            config: Some(config.clone()),
            ..Default::default()
        }))
        .unwrap();
        Self {
            id: response.pod_sandbox_id,
            logs: PathBuf::from(&config.log_directory),
            config,
        }
    }

    pub(crate) fn status(&self) -> Result<PodSandboxStatus, tonic::Status> {
        ask!(pod_sandbox_status(PodSandboxStatusRequest {
            pod_sandbox_id: self.id.clone(),
            verbose: false,
        }))
        .map(|response| response.status.unwrap())
    }

    pub(crate) fn stop(&self) {
        ask!(stop_pod_sandbox(StopPodSandboxRequest {
            pod_sandbox_id: self.id.clone(),
        }))
        .unwrap();
    }

    pub(crate) fn remove(&self) {
        ask!(remove_pod_sandbox(RemovePodSandboxRequest {
            pod_sandbox_id: self.id.clone(),
        }))
        .unwrap();
    }

    /// Returns the configuration of a container that sleeps, after `change`.
    pub(crate) fn container_config(
        &self,
        name: &str,
        change: impl FnOnce(&mut ContainerConfig),
    ) -> ContainerConfig {
        let number = number();
        let mut config = ContainerConfig {
            metadata: Some(ContainerMetadata {
                name: format!("{name}-{number}"),
                attempt: 0,
            }),
            image: Some(image("plain")),
            command: strings(&["sleep", "1000000"]),
            log_path: format!("{name}-{number}.log"),
            ..Default::default()
        };
        // As a kubelet sets it explicitly, because the interface's default is the pod's.
        security(&mut config).namespace_options = Some(NamespaceOption {
            pid: NamespaceMode::Container as i32,
            ..Default::default()
        });
        change(&mut config);
        config
    }

    pub(crate) fn try_create(&self, config: ContainerConfig) -> Result<Container, tonic::Status> {
        let log_path = config.log_path.clone();
        let response = ask!(create_container(CreateContainerRequest {
            pod_sandbox_id: self.id.clone(),
            config: Some(config),
            sandbox_config: Some(self.config.clone()),
        }))?;
        Ok(self.container(response.container_id, &log_path))
    }

    /// Returns a created container.
    fn container(&self, id: String, log_path: &str) -> Container {
        let log = self.logs.join(log_path);
        Container { id, log }
    }

    pub(crate) fn create(
        &self,
        name: &str,
        change: impl FnOnce(&mut ContainerConfig),
    ) -> Container {
        self.try_create(self.container_config(name, change))
            .unwrap()
    }

    /// Creates and starts a container.
    pub(crate) fn start(&self, name: &str, change: impl FnOnce(&mut ContainerConfig)) -> Container {
        let container = self.create(name, change);
        container.start();
        container
    }

    /// Runs a shell script as a container to its end; returns its status and its log's lines.
    pub(crate) fn script(
        &self,
        script: &str,
        change: impl FnOnce(&mut ContainerConfig),
    ) -> (ContainerStatus, Vec<(String, String)>) {
        let container = self.start("script", |config| {
            config.command = strings(&["sh", "-c", script]);
            change(config);
        });
        let status = container.ended();
        let lines = container.lines();
        container.remove();
        (status, lines)
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let pod_sandbox_id = self.id.clone();
        let _ = ask!(stop_pod_sandbox(StopPodSandboxRequest {
            pod_sandbox_id: pod_sandbox_id.clone(),
        }));
        let _ = ask!(remove_pod_sandbox(RemovePodSandboxRequest {
            pod_sandbox_id
        }));
        // What is in it may still be mounted.
        let _ = fs::remove_dir(self.directory());
    }
}

impl Container {
    pub(crate) fn start(&self) {
        ask!(start_container(StartContainerRequest {
            container_id: self.id.clone(),
        }))
        .unwrap();
    }

    pub(crate) fn stop(&self, timeout: i64) {
        ask!(stop_container(StopContainerRequest {
            container_id: self.id.clone(),
            timeout,
        }))
        .unwrap();
    }

    pub(crate) fn remove(&self) {
        ask!(remove_container(RemoveContainerRequest {
            container_id: self.id.clone(),
        }))
        .unwrap();
    }

    pub(crate) fn try_status(&self) -> Result<ContainerStatus, tonic::Status> {
        ask!(container_status(ContainerStatusRequest {
            container_id: self.id.clone(),
            verbose: false,
        }))
        .map(|response| response.status.unwrap())
    }

    pub(crate) fn status(&self) -> ContainerStatus {
        self.try_status().unwrap()
    }

    pub(crate) fn state(&self) -> ContainerState {
        self.status().state()
    }

    /// Returns the status after the container has exited. The interface has no call that waits.
    pub(crate) fn ended(&self) -> ContainerStatus {
        let begin = Instant::now();
        loop {
            let status = self.status();
            if status.state() == ContainerState::ContainerExited {
                return status;
            }
            assert!(begin.elapsed() < PATIENCE, "{status:?}");
            thread::sleep(Duration::from_millis(50));
        }
    }

    pub(crate) fn try_exec(&self, words: &[&str], timeout: i64) -> Result<Output, tonic::Status> {
        let response = ask!(exec_sync(ExecSyncRequest {
            container_id: self.id.clone(),
            cmd: strings(words),
            timeout,
        }))?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok(Output {
            code: response.exit_code,
            stdout: text(response.stdout),
            stderr: text(response.stderr),
        })
    }

    /// Returns the output of a shell in the container; it must succeed.
    #[track_caller]
    pub(crate) fn sh(&self, script: &str) -> String {
        let output = self.try_exec(&["sh", "-c", script], 0).unwrap();
        assert_eq!(
            output.code, 0,
            "{script}: {}{}",
            output.stdout, output.stderr
        );
        output.stdout
    }

    /// Waits until a program in the container listens on a TCP port.
    #[track_caller]
    pub(crate) fn wait_for_listener(&self, port: u16) {
        // As listed by the kernel: the local port in hexadecimal digits, no peer, state LISTEN.
        let script = format!(
            "until busybox grep -q ':{port:04X} 0*:0000 0A' /proc/net/tcp /proc/net/tcp6; \
             do busybox usleep 20000; done"
        );
        let output = self.try_exec(&["sh", "-c", &script], 240).unwrap();
        assert_eq!(output.code, 0, "{}", output.stderr);
    }

    /// Returns stream and text of each line in the log.
    pub(crate) fn lines(&self) -> Vec<(String, String)> {
        let text = fs::read_to_string(&self.log).unwrap();
        text.lines()
            .map(|line| {
                let mut fields = line.splitn(4, ' ');
                let _time = fields.next();
                let stream = fields.next().unwrap().to_owned();
                let _tag = fields.next();
                (stream, fields.next().unwrap_or_default().to_owned())
            })
            .collect()
    }

    pub(crate) fn log(&self) -> &Path {
        &self.log
    }
}

/// Returns the lines of standard output.
pub(crate) fn stdout(lines: &[(String, String)]) -> Vec<&str> {
    lines
        .iter()
        .filter(|(stream, _)| stream == "stdout")
        .map(|(_, text)| text.as_str())
        .collect()
}

pub(crate) fn labels(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs
        .iter()
        .map(|&(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

/// Returns the security context of a container, and creates it if it is missing.
pub(crate) fn security(config: &mut ContainerConfig) -> &mut LinuxContainerSecurityContext {
    config
        .linux
        .get_or_insert_default()
        .security_context
        .get_or_insert_default()
}
