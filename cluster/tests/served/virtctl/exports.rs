//! Volumes that are downloaded.

use std::io::Read as _;
use std::path::Path;

use flate2::read::GzDecoder;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;

use super::super::exports::{Program, claim, exports};
use super::super::nodes::eventually;
use super::super::served;
use super::super::uploads::{address, content};
use super::Virtctl;

/// The command of a download into a file, by way of the program's own address.
fn download(name: &str, more: &str, number: u8, file: &Path) -> String {
    let (service, file) = (address(number), file.display());
    format!(
        "vmexport download {name} {more} --output={file} --service-url={service}:8443 --insecure"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn virtctl_downloads_volumes() {
    let admin = served().admin();
    let virtctl = Virtctl::new(&admin).await;
    let namespace = virtctl.namespace.clone();
    let _controller = super::super::uploads::start_controller(&namespace);
    claim(&admin, &namespace, "disk").await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk");
    let made =
        |name: &str| format!("VirtualMachineExport '{namespace}/{name}' created succesfully");
    virtctl
        .all(&[
            ("vmexport create e --pvc=disk --ttl=1h", Ok(&made("e"))),
            ("vmexport create e --pvc=disk", Err("already exists")),
            ("vmexport create v --vm=vm --labels=team=a", Ok(&made("v"))),
            ("vmexport create s --snapshot=taken", Ok(&made("s"))),
            ("vmexport create n", Err("need to specify export kind")),
            ("vmexport delete n", Ok("does not exist")),
        ])
        .await;
    let known = exports(&admin, &namespace, "v1beta1");
    let of = async |name| known.get(name).await.unwrap().data["spec"].clone();
    let spec = of("e").await;
    assert_eq!(spec["ttlDuration"], "1h0m0s");
    assert_eq!(spec["tokenSecretRef"], "secret-e");
    assert_eq!(of("v").await["source"]["kind"], "VirtualMachine");
    assert_eq!(of("s").await["source"]["apiGroup"], "snapshot.kubevirt.io");

    let program = Program::start(&namespace, "e", address(31), &content()).await;
    let finished = "Download finished succesfully";
    let raw = download("e", "--format=raw", 31, &file);
    virtctl.all(&[(&raw, Ok(finished))]).await;
    assert!(std::fs::read(&file).unwrap() == content());
    let gzip = download("e", "--volume=disk", 31, &file);
    virtctl.all(&[(&gzip, Ok(finished))]).await;
    let mut unpacked = Vec::new();
    let packed = std::fs::File::open(&file).unwrap();
    GzDecoder::new(packed).read_to_end(&mut unpacked).unwrap();
    assert!(unpacked == content());
    let manifest = download("e", "--manifest", 31, &file);
    let no_manifest = Err("unable to access the manifest info");
    virtctl.all(&[(&manifest, no_manifest)]).await;
    drop(program);
    let gone = format!("VirtualMachineExport '{namespace}/e' deleted succesfully");
    virtctl.all(&[("vmexport delete e", Ok(&gone))]).await;

    // Of a claim to which memory was dumped: its files, as a packed archive.
    claim(&admin, &namespace, "dumps").await;
    let note = json!({ "metadata": { "annotations": { "kubevirt.io/memory-dump": "dump" } } });
    let claims = Api::<PersistentVolumeClaim>::namespaced(admin.clone(), &namespace);
    let params = PatchParams::default();
    claims
        .patch("dumps", &params, &Patch::Merge(note))
        .await
        .unwrap();
    let created = virtctl.run("vmexport create d --pvc=dumps").await;
    assert!(created.succeeded, "{created:?}");
    let program = Program::start(&namespace, "d", address(35), &content()).await;
    let archive = download("d", "", 35, &file);
    virtctl.all(&[(&archive, Ok(finished))]).await;
    let packed = std::fs::File::open(&file).unwrap();
    let mut archive = tar::Archive::new(GzDecoder::new(packed));
    let mut entry = archive.entries().unwrap().next().unwrap().unwrap();
    assert_eq!(entry.path().unwrap(), Path::new("vm.memory.dump"));
    unpacked.clear();
    entry.read_to_end(&mut unpacked).unwrap();
    assert!(unpacked == content());
    drop(program);

    // All in one: the export is made, waited for, and deleted.
    for (number, name, keeps) in [(32, "once", false), (33, "kept", true)] {
        let more = match keeps {
            true => "--pvc=disk --format=raw --keep-vme",
            false => "--pvc=disk --format=raw",
        };
        let command = download(name, more, number, &file);
        let said = {
            let virtctl = virtctl.clone();
            tokio::spawn(async move { virtctl.run(&command).await })
        };
        let program = Program::start(&namespace, name, address(number), &content()).await;
        let said = said.await.unwrap();
        assert!(said.succeeded && said.text.contains(finished), "{said:?}");
        assert!(std::fs::read(&file).unwrap() == content());
        drop(program);
        eventually("the export is there or gone", async || {
            let found = known.get_opt(name).await.unwrap();
            (found.is_some() == keeps).then_some(())
        })
        .await;
    }
}

/// No kubelet runs in the tests, and so nothing is forwarded: what leads to the pod is found.
#[tokio::test(flavor = "multi_thread")]
async fn virtctl_finds_what_it_forwards_a_port_to() {
    let admin = served().admin();
    let virtctl = Virtctl::new(&admin).await;
    let namespace = virtctl.namespace.clone();
    let _controller = super::super::uploads::start_controller(&namespace);
    claim(&admin, &namespace, "disk").await;
    let made = virtctl.run("vmexport create e --pvc=disk").await;
    assert!(made.succeeded, "{made:?}");
    let program = Program::start(&namespace, "e", address(34), b"disk").await;
    let forward = "vmexport download e --port-forward --insecure --output=/dev/null";
    let said = virtctl.run(forward).await;
    let ready = "service virt-export-e is ready for port-forwarding";
    assert!(said.text.contains(ready), "{said:?}");
    // Neither the Service's port nor its pod was missing.
    let waited = "timeout waiting for port forwarding to be ready";
    assert!(!said.succeeded && said.text.contains(waited), "{said:?}");
    drop(program);
    let spec = exports(&admin, &namespace, "v1beta1")
        .get("e")
        .await
        .unwrap();
    assert_eq!(spec.data["status"]["links"]["external"], json!(null));
}
