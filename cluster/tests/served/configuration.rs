//! The KubeVirt object: what an administrator decides, and how the components are.

use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::{SYSTEM, api_of, code, migrations, nodes::eventually, object, served, support, vmi};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cluster_has_a_kubevirt_that_says_how_the_components_are_and_is_heeded() {
    let admin = served().admin();
    let namespace = support::namespace(&admin).await;
    let _controller = migrations::start_controller(&namespace);
    let objects = api_of(&admin, SYSTEM, "KubeVirt");
    let status = eventually("all components answer", async || {
        let found = objects.get_opt("kubevirt").await.unwrap()?;
        let status = found.data.get("status")?.clone();
        (status["phase"] == "Deployed").then_some(status)
    });
    let status = status.await;
    let conditions = status["conditions"].as_array().unwrap();
    let available = conditions.iter().find(|one| one["type"] == "Available");
    assert_eq!(available.unwrap()["status"], "True", "{status}");
    assert_eq!(status["observedKubeVirtVersion"], status["operatorVersion"]);

    // What it says has a meaning, or is refused by its path; and there is one place for it.
    let params = PatchParams::default();
    let wrong = json!({ "spec": { "imageTag": "v1", "configuration": {
        "evictionStrategy": "Flee",
        "developerConfiguration": { "useEmulation": true },
    } } });
    let wrong = Patch::Merge(wrong);
    let refused = objects.patch("kubevirt", &params, &wrong).await;
    let Err(kube::Error::Api(refused)) = refused else {
        panic!("{refused:?}");
    };
    let causes = refused.details.unwrap().causes;
    let mut fields: Vec<_> = causes.iter().map(|cause| cause.field.as_str()).collect();
    fields.sort_unstable();
    let wanted = [
        "spec.configuration.developerConfiguration.useEmulation",
        "spec.configuration.evictionStrategy",
        "spec.imageTag",
    ];
    assert_eq!(fields, wanted);
    let elsewhere = api_of(&admin, &namespace, "KubeVirt");
    let second = object("KubeVirt", "kubevirt", json!({}));
    let params = PostParams::default();
    assert_eq!(code(elsewhere.create(&params, &second).await), 422);

    // It is heeded at once, and so is that it is taken back.
    let vmis = api_of(&admin, &namespace, "VirtualMachineInstance");
    let memory = json!({ "memory": { "guest": "128Mi" } });
    for strategy in [json!("None"), Value::Null] {
        let decided = json!({ "spec": { "configuration": { "evictionStrategy": strategy } } });
        let params = PatchParams::default();
        let decided = Patch::Merge(decided);
        let patched = objects.patch("kubevirt", &params, &decided).await;
        patched.unwrap();
        let params = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let heeded = eventually("it is heeded", async || {
            let made = vmis
                .create(&params, &vmi("a", memory.clone()))
                .await
                .unwrap();
            (made.data["spec"]["evictionStrategy"] == strategy).then_some(())
        });
        heeded.await;
    }
}
