//! All that takes part in a migration, as it is: the controller, both nodes' parts, both daemons,
//! and the machines, over a real API server. The kubelets are played.

use std::fs::DirEntry;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::{
    Api, Client,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, PostParams},
};
use podvisor_node_api::messages::{MigrationState, VmName};
use serde_json::{Value, json};

use super::{SYSTEM, api_of, migrations, nodes, object, put_to, served, support};
use support::real::{self, Process, RealKubelets, RealNode};
use tonic::Code;

/// How long a step may take.
const PATIENCE: Duration = Duration::from_secs(90);

/// Two nodes with a VM on the first, which counts.
struct Joined {
    nodes: [Arc<RealNode>; 2],
    vmis: Api<DynamicObject>,
    migrations: Api<DynamicObject>,
    pods: Api<Pod>,
    vm: VmName,
    /// The guest's last letter, and which node it runs on.
    letter: char,
    on: usize,
    namespace: String,
    _kubelets: RealKubelets,
    controller: Option<migrations::Task>,
}

impl Joined {
    async fn new(name: &str) -> Self {
        let server = served();
        let admin: Client = server.admin();
        let namespace = support::namespace(&admin).await;
        let mut both = Vec::new();
        for side in ["a", "b"] {
            let node = format!("{name}-{side}");
            nodes::make_node(&admin, &node).await;
            both.push(Arc::new(RealNode::start(server, &node, SYSTEM)));
        }
        let kubelets = RealKubelets::play(admin.clone(), &namespace, both.clone());
        let mut joined = Self {
            controller: Some(migrations::start_controller(&namespace)),
            vmis: api_of(&admin, &namespace, "VirtualMachineInstance"),
            migrations: api_of(&admin, &namespace, migrations::KIND),
            pods: Api::namespaced(admin, &namespace),
            nodes: both.try_into().ok().unwrap(),
            vm: VmName::new(&namespace, "a", ""),
            letter: '@',
            on: 0,
            namespace,
            _kubelets: kubelets,
        };
        joined.start(name).await;
        joined
    }

    /// Makes the instance, with a label, and waits until it runs.
    async fn start(&mut self, label: &str) {
        let mut instance = object("VirtualMachineInstance", "a", real::specification());
        instance.metadata.labels = Some([("app".to_owned(), label.to_owned())].into());
        let params = PostParams::default();
        let made = self.vmis.create(&params, &instance).await.unwrap();
        self.vm.uid = made.metadata.uid.unwrap();
        self.letter = '@';
        let runs = self.until("the VM runs", async |joined| {
            let status = joined.status().await;
            (status["phase"] == "Running").then(|| status["nodeName"].clone())
        });
        let node = runs.await;
        self.on = usize::from(node != json!(self.nodes[0].name));
        self.counts_on(self.on).await;
    }

    async fn until<T>(&self, what: &str, mut ask: impl AsyncFnMut(&Self) -> Option<T>) -> T {
        let limit = tokio::time::Instant::now() + PATIENCE;
        loop {
            if let Some(found) = ask(self).await {
                return found;
            }
            if tokio::time::Instant::now() > limit {
                let status = self.status().await;
                let logs = self.nodes.each_ref().map(|node| node.logs()).concat();
                panic!("{what}: not within {PATIENCE:?}: {status:#}\n{logs}");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn status(&self) -> Value {
        let found = self.vmis.get_opt("a").await.unwrap();
        found.map_or(Value::Null, |found| found.data["status"].clone())
    }

    /// It runs on this node alone, has all of its memory, and goes on where it was.
    async fn counts_on(&mut self, index: usize) {
        let node = Arc::clone(&self.nodes[index]);
        let next = match self.letter {
            'Z' => 'A',
            letter => char::from(letter as u8 + 1),
        };
        let letter = self
            .until("the guest answers", async |joined| {
                node.letter(&joined.vm).await
            })
            .await;
        assert_eq!(letter, next, "on {}", node.name);
        (self.letter, self.on) = (letter, index);
        assert!(
            !self.nodes[1 - index].runs(&self.vm).await,
            "two copies run"
        );
    }

    async fn migrate(&self, name: &str) -> String {
        let migration = object(migrations::KIND, name, json!({ "vmiName": "a" }));
        let params = PostParams::default();
        let made = self.migrations.create(&params, &migration).await.unwrap();
        made.metadata.uid.unwrap()
    }

    /// Waits for the end of a migration; returns its status.
    async fn ended(&self, name: &str) -> Value {
        self.until("the migration ends", async |joined| {
            let found = joined.migrations.get(name).await.unwrap();
            let status = found.data["status"].clone();
            let ended = ["Succeeded", "Failed"]
                .iter()
                .any(|end| status["phase"] == **end);
            ended.then_some(status)
        })
        .await
    }

    /// Waits until one pod is left, on this node.
    async fn one_pod_on(&self, index: usize) {
        self.until("one pod is left", async |joined| {
            let pods = joined
                .pods
                .list(&ListParams::default())
                .await
                .unwrap()
                .items;
            let [pod] = &pods[..] else { return None };
            let on = support::kubelet::node_of(pod)?;
            (on == joined.nodes[index].name).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_moves_between_two_daemons_and_comes_back() {
    let mut joined = Joined::new("joined").await;
    for number in 0..number("PODVISOR_SOAK_MOVES", 2) {
        let (from, to) = (joined.on, 1 - joined.on);
        let name = format!("m-{number}");
        let began = Instant::now();
        let uid = joined.migrate(&name).await;
        let status = joined.ended(&name).await;
        assert_eq!(status["phase"], "Succeeded", "{status:#}");
        joined.counts_on(to).await;
        eprintln!("migration {number}: {:.1} s", began.elapsed().as_secs_f32());
        joined.one_pod_on(to).await;
        let status = joined.status().await;
        assert_eq!(status["phase"], "Running");
        assert_eq!(status["nodeName"], json!(joined.nodes[to].name));
        let state = &status["migrationState"];
        assert_eq!(state["completed"], json!(true), "{state:#}");
        assert_eq!(state["migrationUid"], json!(uid));
        let vms = joined.nodes[to].vms(&joined.vm).await.unwrap();
        let came = vms[0].migration.as_ref().unwrap();
        assert_eq!(came.state(), MigrationState::Done);
        assert_eq!(came.migration, uid);
        joined
            .until("nothing is left of it", async |joined| {
                let left = joined.nodes[from].vms(&joined.vm).await.unwrap();
                left.is_empty().then_some(())
            })
            .await;
    }
}

/// How many machines have a file open, and that they are machines.
fn machines_with(path: &Path) -> usize {
    let wanted = std::fs::metadata(path).unwrap();
    let wanted = (wanted.dev(), wanted.ino());
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let has_it = |process: &DirEntry| {
        let arguments = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let files = std::fs::read_dir(process.path().join("fd"));
        let mut files = files.into_iter().flatten().flatten();
        String::from_utf8_lossy(&arguments).starts_with("podvisor\0sandbox\0")
            && files.any(|file| {
                let file = std::fs::metadata(file.path());
                file.is_ok_and(|file| (file.dev(), file.ino()) == wanted)
            })
    };
    processes.filter(has_it).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_is_plugged_into_a_running_guest_outlives_a_daemon_and_moves() {
    const VMI: &str = "virtualmachineinstances";
    let mut joined = Joined::new("plugged").await;
    let node = Arc::clone(&joined.nodes[joined.on]);
    let directory = node.claim("data");
    std::fs::create_dir_all(&directory).unwrap();
    let image = directory.join("disk.img");
    // Both nodes have it.
    let there = joined.nodes[1 - joined.on].claim("data");
    std::fs::create_dir_all(there.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink(&directory, there).unwrap();
    std::fs::write(&image, vec![1; 1 << 20]).unwrap();
    let admin = served().admin();
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(admin.clone(), &joined.namespace);
    let claim = serde_json::from_value(json!({
        "metadata": { "name": "data" },
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": { "requests": { "storage": "1Mi" } },
        },
    }))
    .unwrap();
    claims.create(&PostParams::default(), &claim).await.unwrap();
    let add = json!({
        "name": "data",
        "disk": { "disk": {} },
        "volumeSource": { "persistentVolumeClaim": { "claimName": "data" } },
    });
    let (namespace, body) = (joined.namespace.clone(), add.to_string());
    let asked = put_to(&admin, VMI, &namespace, "a", "addvolume", &body).await;
    assert_eq!(asked, 202);
    let entry = |status: &Value| {
        let entries = status["volumeStatus"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        entries.into_iter().find(|entry| entry["name"] == "data")
    };
    let is_ready = async |joined: &Joined| {
        let entry = entry(&joined.status().await)?;
        (entry["phase"] == "Ready").then_some(entry)
    };
    let ready = joined.until("the volume is ready", is_ready).await;
    assert_eq!(ready["target"], "disk/by-id/virtio-data");
    assert_eq!(
        machines_with(&image),
        1,
        "the VM has it, and its keeper does not"
    );
    joined.counts_on(joined.on).await;
    // Nobody else gets it: what keeps it is another instance's.
    let keeper = ready["hotplugVolume"]["attachPodUID"].as_str().unwrap();
    let other = VmName::new(&namespace, "a", "another");
    let refused = node.client().plug_disk(other, keeper).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound, "{refused}");
    let own = &joined.vm;
    let refused = node.client().plug_disk(own.clone(), "none").await;
    assert_eq!(refused.unwrap_err().code(), Code::FailedPrecondition);
    // A keeper is no VM.
    let listed = node.client().list_vms().await.unwrap().vms;
    assert_eq!(listed.len(), 1, "{listed:?}");

    node.kill(Process::Daemon).await;
    node.kill(Process::Agent).await;
    joined.controller = None;
    node.revive(Process::Daemon);
    node.revive(Process::Agent);
    joined.controller = Some(migrations::start_controller(&namespace));
    joined.counts_on(joined.on).await;
    assert_eq!(machines_with(&image), 1);
    node.client()
        .plug_disk(joined.vm.clone(), keeper)
        .await
        .unwrap();
    let to = 1 - joined.on;
    joined.migrate("moves").await;
    let status = joined.ended("moves").await;
    assert_eq!(status["phase"], "Succeeded", "{status:#}");
    joined.counts_on(to).await;
    let is_there = async |joined: &Joined| {
        let entry = is_ready(joined).await?;
        (entry["hotplugVolume"]["attachPodUID"] != keeper).then_some(())
    };
    joined.until("it is plugged in there", is_there).await;
    let left = async |_: &Joined| (machines_with(&image) == 1).then_some(());
    joined.until("one machine has it", left).await;
    // This guest reads no registers.
    let remove = json!({ "name": "data" }).to_string();
    let asked = put_to(&admin, VMI, &namespace, "a", "removevolume", &remove).await;
    assert_eq!(asked, 202);
    joined
        .until("the volume is gone", async |joined| {
            entry(&joined.status().await).is_none().then_some(())
        })
        .await;
    assert_eq!(machines_with(&image), 0);
    joined.counts_on(joined.on).await;
    joined.one_pod_on(joined.on).await;
}

/// What is killed while a VM moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    AtSource(Process),
    AtTarget(Process),
    Controller,
}

/// When it is killed.
#[derive(Debug, Clone, Copy)]
enum Moment {
    /// The node's migration is in this state.
    At(MigrationState),
    /// So long after the migration was made.
    After(Duration),
}

const VICTIMS: [Victim; 7] = [
    Victim::AtSource(Process::Daemon),
    Victim::AtSource(Process::Agent),
    Victim::AtSource(Process::Machines),
    Victim::AtTarget(Process::Daemon),
    Victim::AtTarget(Process::Agent),
    Victim::AtTarget(Process::Machines),
    Victim::Controller,
];

impl Joined {
    /// Waits for the moment; the migration may end before it.
    async fn wait_for(&self, moment: Moment, victim: Victim, name: &str) {
        let state = match moment {
            Moment::After(time) => return tokio::time::sleep(time).await,
            Moment::At(state) => state,
        };
        let index = match victim {
            Victim::AtTarget(_) => 1 - self.on,
            _ => self.on,
        };
        self.until("the moment comes", async |joined| {
            let found = joined.migrations.get(name).await.unwrap();
            let phase = &found.data["status"]["phase"];
            assert!(phase != "Failed", "{:#}", found.data["status"]);
            let vms = joined.nodes[index].vms(&joined.vm).await.unwrap();
            let mut states = vms
                .iter()
                .filter_map(|vm| Some(vm.migration.as_ref()?.state()));
            (phase == "Succeeded" || states.any(|found| found == state)).then_some(())
        })
        .await;
    }

    async fn kill(&mut self, victim: Victim) {
        match victim {
            Victim::AtSource(process) => self.nodes[self.on].kill(process).await,
            Victim::AtTarget(process) => self.nodes[1 - self.on].kill(process).await,
            Victim::Controller => self.controller = None,
        }
    }

    fn revive(&mut self, victim: Victim) {
        match victim {
            Victim::AtSource(process) => self.nodes[self.on].revive(process),
            Victim::AtTarget(process) => self.nodes[1 - self.on].revive(process),
            Victim::Controller => {
                self.controller = Some(migrations::start_controller(&self.namespace));
            }
        }
    }

    /// Migrates, and kills something; afterwards one copy runs, where the cluster says, unless the
    /// only one was killed. Returns what became of it, in words.
    async fn survives(&mut self, name: &str, victim: Victim, at: Moment, down: Duration) -> String {
        let began = Instant::now();
        self.migrate(name).await;
        self.wait_for(at, victim, name).await;
        self.kill(victim).await;
        tokio::time::sleep(down).await;
        self.revive(victim);
        let ended = self.ended(name).await;
        let is_killed = matches!(
            victim,
            Victim::AtSource(Process::Machines) | Victim::AtTarget(Process::Machines)
        );
        let settled = self.until("one copy runs where the cluster says", async |joined| {
            let status = joined.status().await;
            match status["phase"].as_str().unwrap_or_default() {
                "Failed" if is_killed => Some(None),
                "Running" => {
                    let at = |node: &Arc<RealNode>| status["nodeName"] == json!(node.name);
                    let index = joined.nodes.iter().position(at)?;
                    // That it has ended may not be known to the cluster yet.
                    joined.nodes[index]
                        .runs(&joined.vm)
                        .await
                        .then_some(Some(index))
                }
                phase => panic!("{phase}: {status:#}"),
            }
        });
        let at = settled.await;
        let how = match at {
            Some(index) => {
                let has_moved = index != self.on;
                let status = self.status().await;
                let agree = (ended["phase"] == "Succeeded") == has_moved;
                assert!(agree, "{victim:?}, {ended:#}, {status:#}");
                self.counts_on(index).await;
                self.one_pod_on(index).await;
                if has_moved { "moved" } else { "stayed" }
            }
            None => {
                for node in &self.nodes {
                    assert!(!node.runs(&self.vm).await, "{} runs it", node.name);
                }
                self.restart().await;
                "was killed"
            }
        };
        let seconds = began.elapsed().as_secs_f32();
        let why = ended["migrationState"]["failureReason"]
            .as_str()
            .unwrap_or_default();
        format!("{victim:?} {at:?}: it {how}, {seconds:.1} s {why}")
    }

    /// Another instance after one that was killed.
    async fn restart(&mut self) {
        self.vmis
            .delete("a", &DeleteParams::default())
            .await
            .unwrap();
        self.until("the instance is gone", async |joined| {
            joined
                .vmis
                .get_opt("a")
                .await
                .unwrap()
                .is_none()
                .then_some(())
        })
        .await;
        self.until("its pods are gone", async |joined| {
            let pods = joined.pods.list(&ListParams::default()).await.unwrap();
            pods.items.is_empty().then_some(())
        })
        .await;
        self.start("killed").await;
    }
}

/// A generator of numbers that repeat for a seed (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }

    fn millis(&mut self, limit: u64) -> Duration {
        Duration::from_millis(self.below(limit))
    }
}

fn number(variable: &str, default: u64) -> u64 {
    let given = std::env::var(variable).ok();
    given.map_or(default, |text| text.parse().expect(variable))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_copy_runs_whatever_was_killed_while_it_moved() {
    let mut joined = Joined::new("killed").await;
    // So that memory is on its way for a while.
    let gvk = GroupVersionKind::gvk("migrations.kubevirt.io", "v1alpha1", "MigrationPolicy");
    let resource = ApiResource::from_gvk_with_plural(&gvk, "migrationpolicies");
    let policies: Api<DynamicObject> = Api::all_with(served().admin(), &resource);
    let slow = DynamicObject::new("slow-killed", &resource).data(json!({ "spec": {
        "selectors": { "virtualMachineInstanceSelector": { "app": "killed" } },
        "bandwidthPerMigration": "8Mi",
    } }));
    policies
        .create(&PostParams::default(), &slow)
        .await
        .unwrap();

    use MigrationState::{Receiving, Sending, Waiting};
    let down = Duration::from_millis(200);
    for (number, (victim, state)) in [
        (Victim::AtSource(Process::Daemon), Sending),
        (Victim::AtTarget(Process::Machines), Receiving),
        (Victim::AtTarget(Process::Agent), Waiting),
        (Victim::AtSource(Process::Machines), Sending),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("m-{number}");
        let how = joined
            .survives(&name, victim, Moment::At(state), down)
            .await;
        eprintln!("{state:?}, {how}");
    }
    let seed = number("PODVISOR_SOAK_SEED", 47);
    let mut random = Random(seed);
    for round in 0..number("PODVISOR_SOAK_ROUNDS", 0) {
        let victim = VICTIMS[usize::try_from(random.below(VICTIMS.len() as u64)).unwrap()];
        let (after, down) = (random.millis(8000), random.millis(3000));
        let name = format!("r-{round}");
        let how = joined
            .survives(&name, victim, Moment::After(after), down)
            .await;
        eprintln!("{round} (seed {seed}), after {after:?}: {how}");
    }
}
