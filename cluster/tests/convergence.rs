//! Controllers that are killed at random points, users that change their mind, pods that die:
//! everything ends as its specification says.

mod support;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt, watcher};
use podvisor_cluster::controller::{self, Options};
use podvisor_cluster::objects::{Phase, VirtualMachine, VirtualMachineInstance};
use serde_json::json;
use support::kubelet::{self, Kubelet};

const LIMIT: Duration = Duration::from_secs(240);

/// A generator of numbers that repeat for a seed (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn choose<T: Copy>(&mut self, of: &[T]) -> T {
        let index = self.below(of.len() as u64);
        of[usize::try_from(index).unwrap()]
    }
}

fn number(variable: &str, default: u64) -> u64 {
    let given = std::env::var(variable).ok();
    given.map_or(default, |text| text.parse().expect(variable))
}

/// A task that is killed when this is dropped.
struct Task(tokio::task::JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn start_controller(namespace: &str, identity: &str) -> Task {
    let client = support::server().client(identity, &["system:masters"]);
    let mut options = Options::default();
    options.namespace = Some(namespace.to_owned());
    options.lease_namespace = namespace.to_owned();
    options.lease_seconds = 3;
    options.identity = Some(identity.to_owned());
    Task(tokio::spawn(async move {
        controller::run_until(client, &options, std::future::pending()).await;
    }))
}

fn machine(name: &str, strategy: &str) -> VirtualMachine {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": name},
        "spec": {"runStrategy": strategy, "template": {"spec": {
            "domain": {"memory": {"guest": "64Mi"}},
            "volumes": [{"name": "root", "containerDisk": {"image": "registry/tiny:1"}}],
        }}},
    }))
    .unwrap()
}

/// What a test sees of a namespace, kept up to date by watches.
struct View {
    vms: Store<VirtualMachine>,
    vmis: Store<VirtualMachineInstance>,
    pods: Store<Pod>,
    changed: tokio::sync::watch::Receiver<u64>,
    _tasks: [Task; 3],
}

impl View {
    fn of(client: &kube::Client, namespace: &str) -> Self {
        let (sender, changed) = tokio::sync::watch::channel(0);
        let (vms, first) = follow(Api::namespaced(client.clone(), namespace), sender.clone());
        let (vmis, second) = follow(Api::namespaced(client.clone(), namespace), sender.clone());
        let (pods, third) = follow(Api::namespaced(client.clone(), namespace), sender);
        Self {
            vms,
            vmis,
            pods,
            changed,
            _tasks: [first, second, third],
        }
    }

    /// Plays Kubernetes' garbage collector: deletes an instance whose machine is gone, for which a
    /// replica that was killed may have asked in its last moment.
    fn collect_garbage(&self, client: &kube::Client, namespace: &str) -> Task {
        let (vms, vmis) = (self.vms.clone(), self.vmis.clone());
        let machines = Api::<VirtualMachine>::namespaced(client.clone(), namespace);
        let instances = Api::<VirtualMachineInstance>::namespaced(client.clone(), namespace);
        let mut changed = self.changed.clone();
        Task(tokio::spawn(async move {
            while changed.changed().await.is_ok() {
                for vmi in vmis.state() {
                    let owners = vmi.metadata.owner_references.iter().flatten();
                    let mut owners = owners.filter(|owner| owner.kind == "VirtualMachine");
                    let Some(owner) = owners.next() else {
                        continue;
                    };
                    let is = |vm: &VirtualMachine| vm.metadata.uid.as_ref() == Some(&owner.uid);
                    if vms.state().iter().any(|vm| is(vm)) {
                        continue;
                    }
                    // What is followed may lag behind.
                    let machine = machines.get_opt(&owner.name).await.unwrap();
                    if !machine.is_some_and(|vm| is(&vm)) {
                        let name = vmi.metadata.name.as_deref().unwrap();
                        let _ = instances.delete(name, &DeleteParams::default()).await;
                    }
                }
            }
        }))
    }

    /// Waits until nothing is wrong any more.
    async fn settle(&mut self, wrong: impl Fn(&Self) -> Vec<String>) {
        let wait = async {
            while !wrong(self).is_empty() {
                self.changed.changed().await.unwrap();
            }
        };
        if tokio::time::timeout(LIMIT, wait).await.is_err() {
            panic!("not settled:\n{}", wrong(self).join("\n"));
        }
    }
}

fn follow<K>(api: Api<K>, sender: tokio::sync::watch::Sender<u64>) -> (Store<K>, Task)
where
    K: kube::Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + Sync
        + 'static,
{
    let (store, writer) = reflector::store();
    let task = tokio::spawn(async move {
        let changes = watcher(api, watcher::Config::default())
            .default_backoff()
            .reflect(writer)
            .touched_objects();
        futures_util::StreamExt::for_each(changes, |_| {
            sender.send_modify(|count| *count += 1);
            std::future::ready(())
        })
        .await;
    });
    (store, Task(task))
}

/// Returns what is not as the machines' specifications say.
fn wrong(view: &View, wanted: &BTreeMap<String, Option<&str>>) -> Vec<String> {
    let mut wrong = Vec::new();
    let vms = view.vms.state();
    let vmis = view.vmis.state();
    let pods = view.pods.state();
    for (name, strategy) in wanted {
        let vm = vms
            .iter()
            .find(|vm| vm.metadata.name.as_ref() == Some(name));
        let vmi = vmis
            .iter()
            .find(|vmi| vmi.metadata.name.as_ref() == Some(name));
        let pods = pods
            .iter()
            .filter(|pod| {
                let labels = pod.metadata.labels.as_ref();
                labels.and_then(|labels| labels.get("vm.kubevirt.io/name")) == Some(name)
            })
            .count();
        let word = vm.map(|vm| vm.status.printable_status.as_str());
        let phase = vmi.map(|vmi| vmi.status.phase);
        let seen = (word, phase, pods);
        let right = match strategy {
            Some("Always") => seen == (Some("Running"), Some(Phase::Running), 1),
            Some(_) => seen == (Some("Stopped"), None, 0),
            None => seen == (None, None, 0),
        };
        if !right {
            wrong.push(format!("{name} {strategy:?}: {seen:?}"));
        }
    }
    wrong
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_and_changes_at_random_points_converge() {
    let seed = number("PODVISOR_CLUSTER_SEED", 45);
    let machines = number("PODVISOR_CLUSTER_MACHINES", 50);
    let rounds = number("PODVISOR_CLUSTER_ROUNDS", 8);
    println!("PODVISOR_CLUSTER_SEED={seed}");
    let client = support::server().admin();
    let namespace = support::namespace(&client).await;
    let vms = Api::<VirtualMachine>::namespaced(client.clone(), &namespace);
    let vmis = Api::<VirtualMachineInstance>::namespaced(client.clone(), &namespace);
    let pods = Api::<Pod>::namespaced(client.clone(), &namespace);
    let mut view = View::of(&client, &namespace);
    let _kubelet = Kubelet::play(client.clone(), &namespace);
    let _collector = view.collect_garbage(&client, &namespace);
    let mut random = Random(seed);
    let names: Vec<String> = (0..machines).map(|n| format!("vm-{n}")).collect();
    join_all(names.iter().map(async |name| {
        vms.create(&PostParams::default(), &machine(name, "Always"))
            .await
            .unwrap();
    }))
    .await;
    for round in 0..rounds {
        // Two replicas; both are killed in the middle of what they do.
        let identities = ["a", "b"].map(|replica| format!("{replica}-{round}"));
        let running = identities.map(|identity| start_controller(&namespace, &identity));
        let changes = random.below(machines) + 1;
        for _ in 0..changes {
            let name = &names[usize::try_from(random.below(machines)).unwrap()];
            let strategy = random.choose(&["Always", "Halted", "Manual", "RerunOnFailure", "Once"]);
            match random.below(6) {
                0 => {
                    let _ = vmis.delete(name, &DeleteParams::default()).await;
                }
                1 => {
                    let label =
                        ListParams::default().labels(&format!("vm.kubevirt.io/name={name}"));
                    for pod in pods.list(&label).await.unwrap() {
                        let code = i32::try_from(random.below(2)).unwrap();
                        kubelet::exit(&pods, &pod.metadata.name.unwrap(), code).await;
                    }
                }
                2 => {
                    let _ = vms.delete(name, &DeleteParams::default()).await;
                }
                3 => {
                    let _ = vms
                        .create(&PostParams::default(), &machine(name, strategy))
                        .await;
                }
                _ => {
                    let patch = Patch::Merge(json!({"spec": {"runStrategy": strategy}}));
                    let _ = vms.patch(name, &PatchParams::default(), &patch).await;
                }
            }
        }
        // A lease takes its time to be free: most rounds end while it is being waited for or
        // shortly after, some later.
        let until = Duration::from_millis(random.below(6000));
        tokio::time::sleep(until).await;
        drop(running);
    }
    let mut wanted = BTreeMap::new();
    for name in &names {
        let strategy = random.choose(&[Some("Always"), Some("Halted"), None]);
        match strategy {
            Some(strategy) => {
                let _ = vms
                    .create(&PostParams::default(), &machine(name, strategy))
                    .await;
                let patch = Patch::Merge(json!({"spec": {"runStrategy": strategy}}));
                let _ = vms.patch(name, &PatchParams::default(), &patch).await;
            }
            None => {
                let _ = vms.delete(name, &DeleteParams::default()).await;
            }
        }
        // One that is being deleted from before goes, whatever is asked of it.
        let goes = vms
            .get_opt(name)
            .await
            .unwrap()
            .is_none_or(|vm| vm.metadata.deletion_timestamp.is_some());
        wanted.insert(name.clone(), strategy.filter(|_| !goes));
    }
    // Failed starts wait up to minutes: users do not, here.
    for name in &names {
        let patch = Patch::Merge(json!({"status": {"startFailure": null}}));
        let _ = vms
            .patch_status(name, &PatchParams::default(), &patch)
            .await;
    }
    let began = Instant::now();
    let _last = start_controller(&namespace, "last");
    view.settle(|view| wrong(view, &wanted)).await;
    println!("{machines} machines settled after {:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_of_machines_start_within_seconds() {
    let machines = number("PODVISOR_CLUSTER_HUNDREDS", 200);
    let client = support::server().admin();
    let namespace = support::namespace(&client).await;
    let vms = Api::<VirtualMachine>::namespaced(client.clone(), &namespace);
    let mut view = View::of(&client, &namespace);
    let _kubelet = Kubelet::play(client.clone(), &namespace);
    let user = "hundreds";
    let _controller = start_controller(&namespace, user);
    let names: Vec<String> = (0..machines).map(|n| format!("vm-{n}")).collect();
    let began = Instant::now();
    join_all(names.iter().map(async |name| {
        vms.create(&PostParams::default(), &machine(name, "Always"))
            .await
            .unwrap();
    }))
    .await;
    let wanted = names
        .iter()
        .map(|name| (name.clone(), Some("Always")))
        .collect();
    view.settle(|view| wrong(view, &wanted)).await;
    let requests = support::server().requests(user);
    let each = requests.total() as u64 / machines;
    println!(
        "{machines} machines run after {:?}\n{requests}",
        began.elapsed()
    );
    assert!(each <= 20, "{each} requests for each");
}
