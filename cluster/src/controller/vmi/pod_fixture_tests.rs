//! The pods of `tests/pods`, which the node's tests read: they must be what is made here.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use podvisor_cluster_types::ClusterDefaults;
use podvisor_cluster_types::vmi::VmiSpec;
use serde_json::Value;

use super::*;

/// Writes the pods again, if this variable is set.
const WRITE: &str = "PODVISOR_WRITE_PODS";

#[test]
fn the_nodes_tests_read_the_pods_that_are_made_here() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pods");
    let mut seen = 0;
    for entry in fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        let mut stored: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let mut vmi: VirtualMachineInstance =
            serde_json::from_value(stored["instance"].clone()).unwrap();
        // As the webhook does before the controller sees it.
        let mut spec: VmiSpec = serde_json::from_value(vmi.spec.clone()).unwrap();
        spec.apply_defaults(&ClusterDefaults::default());
        spec.set_firmware_uuid(|| "00000000-0000-4000-8000-000000000001".to_owned());
        vmi.spec = serde_json::to_value(&spec).unwrap();
        let claims: BTreeMap<String, String> =
            serde_json::from_value(stored["claims"].clone()).unwrap();
        let made = pod(&vmi, &|claim| {
            claims.get(claim).map(|mode| match mode.as_str() {
                "Block" => VolumeMode::Block,
                _ => VolumeMode::Filesystem,
            })
        });
        let made = serde_json::to_value(made.unwrap()).unwrap();
        if std::env::var_os(WRITE).is_some() {
            stored["pod"] = made.clone();
            let text = serde_json::to_string_pretty(&stored).unwrap();
            fs::write(&path, text + "\n").unwrap();
        }
        let shown = path.display();
        assert_eq!(stored["pod"], made, "{shown}: set {WRITE}=1 to write it");
        seen += 1;
    }
    assert!(seen >= 4, "{} has {seen} pods", dir.display());
}
