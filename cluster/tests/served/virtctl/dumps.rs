//! Dumps of a VM's memory to claims.

use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::{
    Api,
    api::{ListParams, PostParams},
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::super::nodes::eventually;
use super::super::vm;
use super::Scene;

const SUBMITTED: &str = "Successfully submitted memory dump request";

impl Scene {
    fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.admin.clone(), &self.virtctl.namespace)
    }

    async fn claim(&self, name: &str, size: &str, mode: &str) {
        let claim = json!({
            "metadata": { "name": name },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "volumeMode": mode,
                "resources": { "requests": { "storage": size } },
            },
        });
        let claim = serde_json::from_value(claim).unwrap();
        let params = PostParams::default();
        self.claims().create(&params, &claim).await.unwrap();
    }

    /// Waits until the dump of a VM is in a phase, and returns what is reported of it: who asks for
    /// one puts it into the first phase before the answer.
    async fn dump(&self, phase: &str) -> Value {
        let mut seen = String::new();
        for _ in 0..300 {
            let vm = self.vms.get("v").await.unwrap();
            let request = &vm.data["status"]["memoryDumpRequest"];
            if request["phase"] == phase {
                return request.clone();
            }
            assert_ne!(request["phase"], "Failed", "{request}");
            let vmi = self.vmis.get("v").await.unwrap();
            let (volumes, status) = (&vmi.data["spec"]["volumes"], &vmi.data["status"]);
            seen = format!("{request}; {volumes}; {}", status["volumeStatus"]);
            sleep(Duration::from_millis(100)).await;
        }
        panic!("the dump is not {phase}: {seen}");
    }

    /// Waits until the claim has left the instance, and its pod has gone.
    async fn claim_has_left(&self) {
        let pods: Api<Pod> = Api::namespaced(self.admin.clone(), &self.virtctl.namespace);
        eventually("the claim has left the instance", async || {
            let vmi = self.vmis.get("v").await.unwrap();
            let status = vmi.data["status"]["volumeStatus"].to_string();
            let volumes = vmi.data["spec"]["volumes"].to_string();
            (!status.contains("dumps") && !volumes.contains("dumps")).then_some(())
        })
        .await;
        let keepers = ListParams::default().labels("kubevirt.io=hotplug-disk");
        assert_eq!(pods.list(&keepers).await.unwrap().items.len(), 0);
    }

    async fn note_of(&self, claim: &str) -> Option<String> {
        let claim = self.claims().get(claim).await.unwrap();
        let annotations = claim.metadata.annotations.unwrap_or_default();
        annotations.get("kubevirt.io/memory-dump").cloned()
    }
}

fn text(request: &Value, name: &str) -> String {
    request[name].as_str().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn virtctl_dumps_the_memory_of_a_vm_to_a_claim() {
    let scene = Scene::new("virtctl-dumps").await;
    let virtctl = &scene.virtctl;
    let mut made = vm("v", "Always");
    let domain = &mut made.data["spec"]["template"]["spec"]["domain"];
    domain["memory"] = json!({ "guest": "128Mi" });
    domain["resources"] = json!({ "requests": { "memory": "128Mi" } });
    scene.make(&made).await;
    scene.make(&vm("h", "Halted")).await;
    let name = scene.runs("v", None).await;
    // 128 MiB, 100 MiB, and 5.5 % for the file system.
    scene.claim("dumps", "241Mi", "Filesystem").await;
    scene.claim("other", "1Gi", "Filesystem").await;
    scene.claim("small", "240Mi", "Filesystem").await;
    scene.claim("block", "1Gi", "Block").await;
    let get = |claim: &str| format!("memory-dump get v --claim-name={claim}");
    virtctl
        .all(&[
            ("memory-dump get v", Err("a memory dump needs claimName")),
            (
                &get("none"),
                Err("persistentvolumeclaim \"none\" not found"),
            ),
            (&get("small"), Err("is too small")),
            (&get("block"), Err("need volumeMode Filesystem")),
            (&get("a.b"), Err("must be a DNS label")),
            (
                "memory-dump get h --claim-name=dumps",
                Err("virtualmachineinstance.kubevirt.io \"h\" not found"),
            ),
            ("memory-dump remove v", Err("has no claim for memory dumps")),
            (
                "memory-dump get n --claim-name=dumps",
                Err("\"n\" not found"),
            ),
            (&get("dumps"), Ok(SUBMITTED)),
        ])
        .await;
    let done = scene.dump("Completed").await;
    let file = text(&done, "fileName");
    assert!(
        file.starts_with("v-dumps-20") && file.ends_with(".memory.dump"),
        "{done}"
    );
    assert!(!text(&done, "endTimestamp").is_empty(), "{done}");
    let asked = scene.node.machine(&name).done;
    assert!(
        asked
            .iter()
            .all(|what| what.starts_with(&format!("dump {file} by "))),
        "{asked:?}"
    );
    assert!(asked.len() >= 2, "{asked:?}");
    scene.claim_has_left().await;
    assert_eq!(scene.note_of("dumps").await.as_deref(), Some(file.as_str()));
    let vm = scene.vms.get("v").await.unwrap();
    let volumes = vm.data["spec"]["template"]["spec"]["volumes"].clone();
    let kept = json!([{
        "name": "dumps", "memoryDump": { "claimName": "dumps", "hotpluggable": true },
    }]);
    assert_eq!(volumes, kept);
    let conditions = vm.data["status"]["conditions"].to_string();
    assert!(!conditions.contains("RestartRequired"), "{conditions}");

    // To the same claim again, which is full now.
    let why = "no space left on the claim";
    *scene.node.fails_dumps.lock().unwrap() = Some(why.to_owned());
    virtctl
        .all(&[
            (&get("other"), Err("remove that one first")),
            ("memory-dump get v", Ok(SUBMITTED)),
        ])
        .await;
    let failed = scene.dump("Failed").await;
    assert!(text(&failed, "message").contains(why), "{failed}");
    assert!(failed["fileName"].is_null(), "{failed}");
    scene.claim_has_left().await;
    eventually("the claim says so", async || {
        let note = scene.note_of("dumps").await;
        (note.as_deref() == Some("Memory dump failed")).then_some(())
    })
    .await;
    *scene.node.fails_dumps.lock().unwrap() = None;
    virtctl.all(&[(&get("dumps"), Ok(SUBMITTED))]).await;
    let again = scene.dump("Completed").await;
    assert_ne!(text(&again, "fileName"), file);
    assert!(again["message"].is_null(), "{again}");

    virtctl
        .all(&[(
            "memory-dump remove v",
            Ok("Successfully submitted remove memory dump association"),
        )])
        .await;
    eventually("the claim has left the VM", async || {
        let vm = scene.vms.get("v").await.unwrap();
        let volumes = vm.data["spec"]["template"]["spec"]["volumes"].to_string();
        let is_asked = vm.data["status"]["memoryDumpRequest"].is_object();
        (!is_asked && !volumes.contains("dumps")).then_some(())
    })
    .await;
    let gvk = GroupVersionKind::gvk("cdi.kubevirt.io", "v1beta1", "CDIConfig");
    let resource = ApiResource::from_gvk(&gvk);
    let configs: Api<DynamicObject> = Api::all_with(scene.admin.clone(), &resource);
    eventually("claims can be computed", async || {
        let config = configs.get_opt("config").await.unwrap()?;
        config.data["status"]["filesystemOverhead"]
            .is_object()
            .then_some(())
    })
    .await;
    // A claim that virtctl makes is as large as it has to be.
    let makes = format!("{} --create-claim", get("made"));
    virtctl.all(&[(&makes, Ok(SUBMITTED))]).await;
    scene.dump("Completed").await;
    scene.claims().get("made").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dump_of_a_vm_that_is_stopped_meanwhile_has_failed() {
    let scene = Scene::new("virtctl-dump-stops").await;
    let mut made = vm("v", "Always");
    let domain = &mut made.data["spec"]["template"]["spec"]["domain"];
    domain["memory"] = json!({ "guest": "128Mi" });
    scene.make(&made).await;
    scene.runs("v", None).await;
    scene.claim("dumps", "1Gi", "Filesystem").await;
    let get = "memory-dump get v --claim-name=dumps";
    scene.virtctl.all(&[(get, Ok(SUBMITTED))]).await;
    eventually("the VM is to stop", async || {
        // The controller changes the VM, too.
        let said = scene.virtctl.run("stop v").await;
        said.succeeded.then_some(())
    })
    .await;
    scene.is_gone("v").await;
    eventually("the dump is over", async || {
        let vm = scene.vms.get("v").await.unwrap();
        let request = &vm.data["status"]["memoryDumpRequest"];
        // It may have been written before.
        let is_over = request["phase"] == "Completed"
            || request["message"] == "the virtual machine does not run";
        is_over.then_some(())
    })
    .await;
    // Its next instance begins without the claim.
    let started = scene.virtctl.run("start v").await;
    assert!(started.succeeded, "{started:?}");
    scene.runs("v", None).await;
    let vmi = scene.vmis.get("v").await.unwrap();
    assert!(
        !vmi.data["spec"]["volumes"]
            .to_string()
            .contains("memoryDump")
    );
}
