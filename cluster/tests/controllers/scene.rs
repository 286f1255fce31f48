//! A controller, and a namespace with its objects.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Api, Client};
use podvisor_cluster::controller::{self, Options};
use podvisor_cluster::objects::{VirtualMachine, VirtualMachineInstance};
use serde_json::{Value, json};

use super::support;
use super::support::kubelet::Kubelet;

/// How long a state may take to be reached on a busy machine.
pub(super) const LIMIT: Duration = Duration::from_secs(120);

/// A running controller; dropped, it is as if it were killed.
pub(super) struct Controller(tokio::task::JoinHandle<()>);

impl Controller {
    pub(super) fn start(namespace: &str, user: &str) -> Self {
        Self::named(namespace, user, user)
    }

    pub(super) fn named(namespace: &str, user: &str, identity: &str) -> Self {
        let client = support::server().client(user, &["system:masters"]);
        let mut options = Options::default();
        options.namespace = Some(namespace.to_owned());
        options.lease_namespace = namespace.to_owned();
        options.lease_seconds = 3;
        options.identity = Some(identity.to_owned());
        Self(tokio::spawn(async move {
            controller::run_until(client, &options, std::future::pending()).await;
        }))
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A namespace with its objects.
pub(super) struct Scene {
    pub(super) client: Client,
    pub(super) namespace: String,
    pub(super) vms: Api<VirtualMachine>,
    pub(super) vmis: Api<VirtualMachineInstance>,
    pub(super) pods: Api<Pod>,
}

impl Scene {
    pub(super) async fn new() -> Self {
        let client = support::server().admin();
        let namespace = support::namespace(&client).await;
        Self {
            vms: Api::namespaced(client.clone(), &namespace),
            vmis: Api::namespaced(client.clone(), &namespace),
            pods: Api::namespaced(client.clone(), &namespace),
            client,
            namespace,
        }
    }

    pub(super) fn play_kubelet(&self) -> Kubelet {
        Kubelet::play(self.client.clone(), &self.namespace)
    }

    pub(super) async fn create(&self, name: &str, strategy: &str) {
        self.vms
            .create(&PostParams::default(), &machine(name, strategy))
            .await
            .unwrap();
    }

    pub(super) async fn patch(&self, name: &str, patch: Value) {
        self.vms
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .unwrap();
    }

    /// Waits until a virtual machine is called `word`.
    pub(super) async fn becomes(&self, name: &str, word: &str) -> VirtualMachine {
        let reached =
            |vm: Option<&VirtualMachine>| vm.is_some_and(|vm| vm.status.printable_status == word);
        let wait = await_condition(self.vms.clone(), name, reached);
        match tokio::time::timeout(LIMIT, wait).await {
            Ok(vm) => vm.unwrap().unwrap(),
            Err(_) => panic!(
                "{name} is not {word}: {:#?}",
                self.vms.get_opt(name).await.unwrap().map(|vm| vm.status)
            ),
        }
    }

    /// Waits until an instance is as wanted.
    pub(super) async fn instance(
        &self,
        name: &str,
        wanted: impl Fn(Option<&VirtualMachineInstance>) -> bool,
    ) -> Option<VirtualMachineInstance> {
        let wait = await_condition(self.vmis.clone(), name, wanted);
        tokio::time::timeout(LIMIT, wait)
            .await
            .expect("the instance does not get there")
            .unwrap()
    }

    /// Waits until a virtual machine is gone.
    pub(super) async fn gone(&self, name: &str) {
        let wait = await_condition(self.vms.clone(), name, |vm: Option<&VirtualMachine>| {
            vm.is_none()
        });
        tokio::time::timeout(LIMIT, wait)
            .await
            .expect("the virtual machine stays")
            .unwrap();
    }

    pub(super) async fn only_pod(&self) -> Pod {
        let pods = self.pods.list(&ListParams::default()).await.unwrap();
        let [pod] = &pods.items[..] else {
            panic!("{} pods", pods.items.len());
        };
        pod.clone()
    }
}

pub(super) fn machine(name: &str, strategy: &str) -> VirtualMachine {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": name},
        "spec": {
            "runStrategy": strategy,
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {
                    "domain": {
                        "memory": {"guest": "128Mi"},
                        "devices": {"disks": [
                            {"name": "root", "disk": {}}, {"name": "seed", "disk": {}},
                        ]},
                    },
                    "volumes": [
                        {"name": "root", "containerDisk": {"image": "registry/debian:12"}},
                        {"name": "seed", "cloudInitNoCloud": {"userData": "#cloud-config\n"}},
                    ],
                },
            },
        },
    }))
    .unwrap()
}
