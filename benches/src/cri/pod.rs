//! The calls of a pod's lifecycle.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use podvisor_cri_messages::{
    ContainerConfig, ContainerMetadata, CreateContainerRequest, ExecSyncRequest,
    ImageServiceClient, ImageSpec, LinuxPodSandboxConfig, PodSandboxConfig, PodSandboxMetadata,
    PullImageRequest, RemoveImageRequest, RemovePodSandboxRequest, RunPodSandboxRequest,
    RuntimeServiceClient, StartContainerRequest, StopPodSandboxRequest,
};
use tonic::transport::{Channel, Endpoint};

use super::runtime::IMAGE;

/// More than any call takes.
const LIMIT: Duration = Duration::from_secs(300);

#[derive(Debug, Clone)]
pub(super) struct Client {
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
}

impl Client {
    pub(super) async fn connect(socket: &Path) -> Result<Self> {
        let address = format!("unix://{}", socket.display());
        let channel = Endpoint::new(address)?.timeout(LIMIT).connect().await?;
        Ok(Self {
            runtime: RuntimeServiceClient::new(channel.clone()),
            images: ImageServiceClient::new(channel),
        })
    }

    pub(super) async fn pull(&self, name: &str) -> Result<()> {
        let request = PullImageRequest {
            image: Some(image(name)),
            ..PullImageRequest::default()
        };
        let pulled = self.images.clone().pull_image(request).await;
        pulled.with_context(|| format!("PullImage {name}"))?;
        Ok(())
    }

    pub(super) async fn remove_image(&self, name: &str) -> Result<()> {
        let request = RemoveImageRequest {
            image: Some(image(name)),
        };
        self.images.clone().remove_image(request).await?;
        Ok(())
    }
}

fn image(name: &str) -> ImageSpec {
    ImageSpec {
        image: name.to_owned(),
        ..ImageSpec::default()
    }
}

/// A pod whose container sleeps.
#[derive(Debug)]
pub(super) struct Pod {
    client: Client,
    id: String,
    container: String,
    /// The durations of the calls that created it.
    pub(super) times: Vec<(&'static str, Duration)>,
}

impl Pod {
    pub(super) async fn run(client: &Client, name: &str) -> Result<Self> {
        let mut runtime = client.runtime.clone();
        let config = PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: name.to_owned(),
                uid: format!("uid-{name}"),
                namespace: "bench".to_owned(),
                attempt: 0,
            }),
            hostname: "bench".to_owned(),
            linux: Some(LinuxPodSandboxConfig::default()),
            ..PodSandboxConfig::default()
        };
        let mut times = Vec::new();
        let mut began = Instant::now();
        let mut note = |call: &'static str| {
            times.push((call, began.elapsed()));
            began = Instant::now();
        };
        let request = RunPodSandboxRequest {
            config: Some(config.clone()),
            runtime_handler: String::new(),
        };
        let made = runtime.run_pod_sandbox(request).await;
        let id = made.context("RunPodSandbox")?.into_inner().pod_sandbox_id;
        note("RunPodSandbox");
        let request = CreateContainerRequest {
            pod_sandbox_id: id.clone(),
            config: Some(ContainerConfig {
                metadata: Some(ContainerMetadata {
                    name: "sleep".to_owned(),
                    attempt: 0,
                }),
                image: Some(image(IMAGE)),
                ..ContainerConfig::default()
            }),
            sandbox_config: Some(config),
        };
        let made = runtime.create_container(request).await;
        let container = made.context("CreateContainer")?.into_inner().container_id;
        note("CreateContainer");
        let request = StartContainerRequest {
            container_id: container.clone(),
        };
        runtime
            .start_container(request)
            .await
            .context("StartContainer")?;
        note("StartContainer");
        Ok(Self {
            client: client.clone(),
            id,
            container,
            times,
        })
    }

    /// Runs `true` in its container.
    pub(super) async fn exec(&self) -> Result<()> {
        let request = ExecSyncRequest {
            container_id: self.container.clone(),
            cmd: vec!["/bin/busybox".to_owned(), "true".to_owned()],
            timeout: 0,
        };
        let answer = self.client.runtime.clone().exec_sync(request).await;
        match answer.context("ExecSync")?.into_inner().exit_code {
            0 => Ok(()),
            code => bail!("ExecSync of `true` ended with {code}"),
        }
    }

    /// Stops and removes it; returns how long the two take.
    pub(super) async fn remove(self) -> Result<(Duration, Duration)> {
        let mut runtime = self.client.runtime.clone();
        let began = Instant::now();
        let request = StopPodSandboxRequest {
            pod_sandbox_id: self.id.clone(),
        };
        runtime
            .stop_pod_sandbox(request)
            .await
            .context("StopPodSandbox")?;
        let stopped = began.elapsed();
        let request = RemovePodSandboxRequest {
            pod_sandbox_id: self.id,
        };
        runtime
            .remove_pod_sandbox(request)
            .await
            .context("RemovePodSandbox")?;
        Ok((stopped, began.elapsed().saturating_sub(stopped)))
    }
}
