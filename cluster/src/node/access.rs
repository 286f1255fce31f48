//! The credentials by which a node is known to the API server.

use std::{
    path::{Path, PathBuf},
    sync::{PoisonError, RwLock},
};

use anyhow::{Context as _, bail};
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use kube::{
    Api, Client, Config,
    api::PostParams,
    config::{KubeConfigOptions, Kubeconfig},
};

/// What the names of all kubelets begin with.
const PREFIX: &str = "system:node:";

/// A client with a kubelet's credentials, which are read again when they were replaced.
#[allow(missing_debug_implementations, reason = "a client has none")]
pub struct Access {
    kubeconfig: Option<PathBuf>,
    client: RwLock<Client>,
}

impl Access {
    /// Credentials from a kubelet's file.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or has no valid credentials.
    pub async fn from_file(kubeconfig: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            client: RwLock::new(read(kubeconfig).await?),
            kubeconfig: Some(kubeconfig.to_owned()),
        })
    }

    /// A client that is never replaced.
    #[must_use]
    pub fn of(client: Client) -> Self {
        Self {
            kubeconfig: None,
            client: RwLock::new(client),
        }
    }

    /// The client to use now.
    pub(super) fn client(&self) -> Client {
        let client = self.client.read();
        client.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the credentials again.
    pub(super) async fn refresh(&self) -> anyhow::Result<()> {
        if let Some(kubeconfig) = &self.kubeconfig {
            let client = read(kubeconfig).await?;
            *self.client.write().unwrap_or_else(PoisonError::into_inner) = client;
        }
        Ok(())
    }

    /// The node that the credentials are of, as the API server says.
    pub(super) async fn node(&self) -> anyhow::Result<String> {
        let api: Api<SelfSubjectReview> = Api::all(self.client());
        let review = api
            .create(&PostParams::default(), &SelfSubjectReview::default())
            .await
            .context("failed to ask the API server whose credentials these are")?;
        let user = review.status.and_then(|status| status.user_info);
        let user = user.and_then(|user| user.username).unwrap_or_default();
        match user.strip_prefix(PREFIX) {
            Some(node) if !node.is_empty() => Ok(node.to_owned()),
            _ => bail!("{user} is no kubelet: give a kubelet's credentials by --kubeconfig"),
        }
    }
}

async fn read(kubeconfig: &Path) -> anyhow::Result<Client> {
    let failed = || format!("failed to read credentials from {}", kubeconfig.display());
    let file = Kubeconfig::read_from(kubeconfig).with_context(failed)?;
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(file, &options);
    Client::try_from(config.await.with_context(failed)?).with_context(failed)
}
