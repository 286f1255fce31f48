//! The life of a pod, as a kubelet asks for it: a sandbox, a web server and a program beside it,
//! each from an image of its own; their logs, an exec, and the end.
//!
//! ```text
//! podvisor serve &
//! cargo run --example pod -- SOCKET SERVER-IMAGE CLIENT-IMAGE
//! ```
//!
//! The server's image must have busybox at `/bin/busybox`, the client's a shell and `wget`.

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use podvisor_cri_messages::*;
use tonic::transport::{Channel, Endpoint};

const SERVER: &str = "mkdir -p /srv/www; echo hello from the pod >/srv/www/index.html; \
                      echo serving; exec busybox httpd -f -p 8080 -h /srv/www";
const CLIENT: &str = "until busybox wget -q -O - http://127.0.0.1:8080/; do sleep 0.1; done; \
                      echo \"$(hostname) at $(busybox ip -4 -o addr show eth0)\"";

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let [socket, server, client] =
        <[String; 3]>::try_from(std::env::args().skip(1).collect::<Vec<_>>())
            .map_err(|_| "usage: pod SOCKET SERVER-IMAGE CLIENT-IMAGE")?;
    let channel = Endpoint::new(format!("unix://{socket}"))?.connect().await?;
    let mut node = Node {
        runtime: RuntimeServiceClient::new(channel.clone()),
        images: ImageServiceClient::new(channel),
        began: Instant::now(),
    };
    let logs = std::env::temp_dir().join(format!("pod-logs-{}", std::process::id()));
    std::fs::create_dir_all(&logs)?;
    let outcome = node.story(logs.clone(), &server, &client).await;
    std::fs::remove_dir_all(&logs)?;
    outcome
}

struct Node {
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
    began: Instant,
}

impl Node {
    async fn story(&mut self, logs: PathBuf, server: &str, client: &str) -> Result<()> {
        let version = self.runtime.version(VersionRequest::default()).await?;
        let version = version.into_inner();
        self.say(format!(
            "{} {}, CRI {}",
            version.runtime_name, version.runtime_version, version.runtime_api_version
        ));
        for image in [server, client] {
            let reference = self.image(image).await?;
            self.say(format!("image {reference}"));
        }

        let config = PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: "demo".to_owned(),
                namespace: "default".to_owned(),
                uid: format!("demo-{}", std::process::id()),
                attempt: 0,
            }),
            hostname: "demo".to_owned(),
            log_directory: logs.display().to_string(),
            linux: Some(LinuxPodSandboxConfig::default()),
            ..Default::default()
        };
        let request = RunPodSandboxRequest {
            config: Some(config.clone()),
            ..Default::default()
        };
        let pod = self.runtime.run_pod_sandbox(request).await?.into_inner();
        let pod = pod.pod_sandbox_id;
        let outcome = self
            .containers(&pod, &config, &logs, [server, client])
            .await;
        // Whatever happened, nothing stays.
        let pod_sandbox_id = pod;
        let stop = StopPodSandboxRequest {
            pod_sandbox_id: pod_sandbox_id.clone(),
        };
        self.runtime.stop_pod_sandbox(stop).await?;
        self.say("stopped");
        let remove = RemovePodSandboxRequest { pod_sandbox_id };
        self.runtime.remove_pod_sandbox(remove).await?;
        self.say("removed");
        outcome
    }

    /// Pulls an image that is not there yet.
    async fn image(&mut self, name: &str) -> Result<String> {
        let request = ImageStatusRequest {
            image: Some(image_spec(name)),
            verbose: false,
        };
        let status = self.images.image_status(request).await?.into_inner();
        if let Some(image) = status.image {
            return Ok(image.id);
        }
        let request = PullImageRequest {
            image: Some(image_spec(name)),
            ..Default::default()
        };
        let pulled = self.images.pull_image(request).await?.into_inner();
        Ok(pulled.image_ref)
    }

    async fn containers(
        &mut self,
        pod: &str,
        config: &PodSandboxConfig,
        logs: &std::path::Path,
        [server, client]: [&str; 2],
    ) -> Result<()> {
        let request = PodSandboxStatusRequest {
            pod_sandbox_id: pod.to_owned(),
            verbose: false,
        };
        let status = self.runtime.pod_sandbox_status(request).await?.into_inner();
        let address = status.status.and_then(|status| status.network);
        let address = address.map(|network| network.ip).unwrap_or_default();
        self.say(format!("pod {} is ready at {address}", short(pod)));

        let server = self.start(pod, config, "server", server, SERVER).await?;
        let client = self.start(pod, config, "client", client, CLIENT).await?;
        let ended = self.ended(&client).await?;
        self.say(format!("the client ended with {}", ended.exit_code));
        let exec = ExecSyncRequest {
            container_id: server.clone(),
            cmd: ["busybox", "uname", "-sr"].map(str::to_owned).to_vec(),
            timeout: 60,
        };
        let answer = self.runtime.exec_sync(exec).await?.into_inner();
        let text = String::from_utf8_lossy(&answer.stdout).into_owned();
        self.say(format!("exec in the server: {}", text.trim_end()));
        for name in ["server", "client"] {
            let text = std::fs::read_to_string(logs.join(format!("{name}.log")))?;
            for line in text.lines() {
                println!("    {name}.log: {line}");
            }
        }
        if ended.exit_code != 0 {
            return Err(format!("the client ended with {}", ended.exit_code).into());
        }
        Ok(())
    }

    async fn start(
        &mut self,
        pod: &str,
        sandbox: &PodSandboxConfig,
        name: &str,
        image: &str,
        script: &str,
    ) -> Result<String> {
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata {
                name: name.to_owned(),
                attempt: 0,
            }),
            image: Some(image_spec(image)),
            command: ["sh", "-c", script].map(str::to_owned).to_vec(),
            log_path: format!("{name}.log"),
            linux: Some(LinuxContainerConfig::default()),
            ..Default::default()
        };
        let request = CreateContainerRequest {
            pod_sandbox_id: pod.to_owned(),
            config: Some(config),
            sandbox_config: Some(sandbox.clone()),
        };
        let created = self.runtime.create_container(request).await?.into_inner();
        let container_id = created.container_id;
        let request = StartContainerRequest {
            container_id: container_id.clone(),
        };
        self.runtime.start_container(request).await?;
        self.say(format!("container {name} ({}) runs", short(&container_id)));
        Ok(container_id)
    }

    /// The interface has no call that waits for an end.
    async fn ended(&mut self, container_id: &str) -> Result<ContainerStatus> {
        loop {
            let request = ContainerStatusRequest {
                container_id: container_id.to_owned(),
                verbose: false,
            };
            let response = self.runtime.container_status(request).await?.into_inner();
            let status = response.status.ok_or("a container without a status")?;
            if status.state() == ContainerState::ContainerExited {
                return Ok(status);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn say(&self, what: impl std::fmt::Display) {
        println!("{:>8.2} s  {what}", self.began.elapsed().as_secs_f64());
    }
}

fn image_spec(name: &str) -> ImageSpec {
    ImageSpec {
        image: name.to_owned(),
        ..Default::default()
    }
}

fn short(id: &str) -> &str {
    id.get(..12).unwrap_or(id)
}
