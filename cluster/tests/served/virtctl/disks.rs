//! Volumes that are plugged in, credentials, and disks that are uploaded.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
};
use serde_json::json;

use super::super::nodes::eventually;
use super::super::uploads::{self, Program};
use super::super::{served, vm};
use super::manifests::create;
use super::{Scene, Virtctl};

#[tokio::test]
async fn virtctl_plugs_volumes_and_gives_credentials() {
    let scene = Scene::new("virtctl-plugs").await;
    let virtctl = &scene.virtctl;
    scene.make(&vm("v", "Always")).await;
    scene.make(&vm("h", "Halted")).await;
    scene.runs("v", None).await;
    let claim = serde_json::from_value(json!({
        "metadata": { "name": "data" },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "1Gi" } },
        },
    }));
    let claims = Api::<PersistentVolumeClaim>::namespaced(scene.admin.clone(), &virtctl.namespace);
    let params = PostParams::default();
    claims.create(&params, &claim.unwrap()).await.unwrap();
    let (added, removed) = (
        "Successfully submitted add",
        "Successfully submitted remove",
    );
    virtctl
        .all(&[
            (
                "addvolume v --volume-name=nothing",
                Err("is not a DataVolume or PersistentVolumeClaim"),
            ),
            (
                "addvolume v --volume-name=data --disk-type=lun",
                Err("disks[0].lun is not supported"),
            ),
            ("addvolume v --volume-name=data --dry-run", Ok(added)),
            (
                "addvolume v --volume-name=data --dry-run --persist",
                Ok(added),
            ),
            (
                "removevolume v --volume-name=data",
                Err("because it does not exist"),
            ),
            ("addvolume v --volume-name=data --cache=none", Ok(added)),
            (
                "addvolume v --volume-name=data",
                Err("volume with that name already exists"),
            ),
            ("removevolume v --volume-name=data", Ok(removed)),
            ("addvolume h --volume-name=data", Err("\"h\" not found")),
            (
                "addvolume h --volume-name=data --persist --bus=virtio",
                Ok(added),
            ),
            ("removevolume h --volume-name=data --persist", Ok(removed)),
        ])
        .await;

    let key = "credentials add-ssh-key --user=root --value=ssh-ed25519";
    virtctl
        .all(&[
            (&format!("{key} v"), Err("virtual machine v is running")),
            (&format!("{key} h"), Ok("")),
            (
                &format!("{key}AA h"),
                Ok("Successfully added the key to secret"),
            ),
            (
                "credentials set-password --user=root --password=x h",
                Err("no secrets assigned to UserPassword AccessCredentials"),
            ),
        ])
        .await;
    let vm = scene.vms.get("h").await.unwrap();
    let credential = &vm.data["spec"]["template"]["spec"]["accessCredentials"][0]["sshPublicKey"];
    let users = &credential["propagationMethod"]["qemuGuestAgent"]["users"];
    assert_eq!(*users, json!(["root"]));

    let made = "create vm --name=p --run-strategy=Halted --access-cred=type:password,src:words";
    let made = virtctl.run(made).await.text;
    let namespace = &virtctl.namespace;
    create(&scene.admin, namespace, &made, false).await.unwrap();
    let words = serde_json::from_value(json!({ "metadata": { "name": "words" } }));
    let secrets = Api::<Secret>::namespaced(scene.admin.clone(), namespace);
    secrets.create(&params, &words.unwrap()).await.unwrap();
    let set = "credentials set-password --user=root --password=x p";
    virtctl
        .all(&[
            (
                set,
                Err("does not have an owner reference pointing to VM p"),
            ),
            (
                &format!("{set} --force"),
                Ok("Successfully set password in secret"),
            ),
            (&format!("{key} --create-secret p"), Ok("")),
            (
                "credentials remove-ssh-key --user=root --value=ssh-ed25519 p",
                Ok(""),
            ),
        ])
        .await;
    let words = secrets.get("words").await.unwrap();
    assert_eq!(words.data.unwrap()["root"].0, b"x");
}

#[tokio::test(flavor = "multi_thread")]
async fn virtctl_uploads_a_disk_where_the_cluster_says() {
    let admin = served().admin();
    let virtctl = Virtctl::new(&admin).await;
    let namespace = virtctl.namespace.clone();
    let (_proxy, proxy) = uploads::start_proxy().await;
    let _controller = uploads::start_controller(&namespace);
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.qcow2");
    let convert = ["convert", "-fraw", "-Oqcow2", "-c"];
    std::fs::write(
        &image,
        uploads::packed(&uploads::content(), "qemu-img", &convert),
    )
    .unwrap();
    let upload = format!("--size=8Mi --insecure --image-path={}", image.display());

    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(
        "cdi.kubevirt.io",
        "v1beta1",
        "CDIConfig",
    ));
    let configs: Api<DynamicObject> = Api::all_with(admin.clone(), &resource);
    eventually("there is a configuration", async || {
        configs.get_opt("config").await.unwrap()
    })
    .await;
    let archive = format!("--size=8Mi --archive-path={}", image.display());
    for (what, why) in [
        (
            "dv archive",
            "spec.contentType is \"archive\", which is not supported",
        ),
        ("pvc archive", "Provisioning failed: no upload can be taken"),
    ] {
        let refused = virtctl.run(&format!("image-upload {what} {archive}")).await;
        assert!(
            !refused.succeeded && refused.text.contains(why),
            "{refused:?}"
        );
    }
    for (number, kind, name) in [(11, "dv", "volume"), (12, "pvc", "claim")] {
        let url =
            json!({ "uploadProxyURLOverride": format!("https://localhost:{}", proxy.port()) });
        let url = Patch::Merge(json!({ "spec": url }));
        let params = PatchParams::default();
        configs.patch("config", &params, &url).await.unwrap();
        let said = {
            let (virtctl, upload) = (virtctl.clone(), upload.clone());
            tokio::spawn(async move {
                virtctl
                    .run(&format!("image-upload {kind} {name} {upload}"))
                    .await
            })
        };
        uploads::bind(&namespace, name).await;
        let program = Program::start(&namespace, name, uploads::address(number)).await;
        assert!(program.finish().await.starts_with(&uploads::content()));
        let said = said.await.unwrap();
        assert!(
            said.succeeded && said.text.contains("completed successfully"),
            "{said:?}"
        );
        let again = virtctl
            .run(&format!("image-upload {kind} {name} {upload}"))
            .await;
        assert!(
            again.text.contains("already successfully imported"),
            "{again:?}"
        );
    }
}
