//! How snapshots of a claim are taken: the VolumeSnapshotClass of its storage's driver.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimSpec};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::ListParams;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Client};

use crate::controller::error::code;

/// Annotation of the class that is taken where a driver has several.
const DEFAULT: &str = "snapshot.storage.kubernetes.io/is-default-class";

/// The classes of a cluster.
#[derive(Debug, Default)]
pub(super) struct Classes {
    /// The driver of each storage class.
    drivers: BTreeMap<String, String>,
    /// The class for snapshots of each driver.
    snapshots: BTreeMap<String, Chosen>,
}

/// A class, and whether an administrator chose it.
#[derive(Debug)]
struct Chosen {
    name: String,
    is_default: bool,
    is_only: bool,
}

impl Classes {
    /// Reads the classes of a cluster.
    pub(super) async fn read(client: &Client) -> Result<Self, kube::Error> {
        let all = ListParams::default();
        let storage = Api::<StorageClass>::all(client.clone()).list(&all).await?;
        let drivers = storage.items.into_iter().filter_map(|class| {
            let name = class.metadata.name?;
            Some((name, class.provisioner))
        });
        let kind = GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", "VolumeSnapshotClass");
        let kind = ApiResource::from_gvk_with_plural(&kind, "volumesnapshotclasses");
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &kind);
        let snapshots = match api.list(&all).await {
            Ok(list) => list.items,
            // The cluster has no such kind.
            Err(error) if code(&error) == Some(404) => Vec::new(),
            Err(error) => return Err(error),
        };
        Ok(Self::of_all(drivers.collect(), snapshots))
    }

    fn of_all(drivers: BTreeMap<String, String>, snapshots: Vec<DynamicObject>) -> Self {
        let mut of_drivers: BTreeMap<String, Chosen> = BTreeMap::new();
        for class in snapshots {
            let driver = class.data.get("driver").and_then(|driver| driver.as_str());
            let (Some(driver), Some(name)) = (driver, class.metadata.name) else {
                continue;
            };
            let annotations = class.metadata.annotations.unwrap_or_default();
            let is_default = annotations.get(DEFAULT).is_some_and(|text| text == "true");
            match of_drivers.get_mut(driver) {
                None => {
                    let chosen = Chosen {
                        name,
                        is_default,
                        is_only: true,
                    };
                    of_drivers.insert(driver.to_owned(), chosen);
                }
                Some(chosen) => {
                    chosen.is_only = false;
                    if is_default && !chosen.is_default {
                        (chosen.name, chosen.is_default) = (name, true);
                    }
                }
            }
        }
        Self {
            drivers,
            snapshots: of_drivers,
        }
    }

    /// One storage class with its driver, and classes for snapshots with theirs.
    #[cfg(test)]
    pub(super) fn with(class: &str, driver: &str, snapshots: &[(&str, &str)]) -> Self {
        let drivers = BTreeMap::from([(class.to_owned(), driver.to_owned())]);
        let snapshots = snapshots.iter().map(|(name, driver)| {
            let kind =
                GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", "VolumeSnapshotClass");
            let class = DynamicObject::new(name, &ApiResource::from_gvk(&kind));
            class.data(serde_json::json!({"driver": driver}))
        });
        Self::of_all(drivers, snapshots.collect())
    }

    /// Returns the class for snapshots of a claim that has a volume.
    pub(super) fn of(&self, claim: &PersistentVolumeClaim) -> Option<String> {
        let phase = claim.status.as_ref()?.phase.as_deref();
        let spec = claim.spec.as_ref().filter(|_| phase == Some("Bound"))?;
        self.of_spec(spec)
    }

    /// Returns the class for snapshots of claims like this.
    pub(super) fn of_spec(&self, spec: &PersistentVolumeClaimSpec) -> Option<String> {
        let driver = self.drivers.get(spec.storage_class_name.as_ref()?)?;
        let chosen = self.snapshots.get(driver)?;
        (chosen.is_only || chosen.is_default).then(|| chosen.name.clone())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn class(name: &str, driver: &str, is_default: bool) -> DynamicObject {
        let annotations = json!({DEFAULT: is_default.to_string()});
        serde_json::from_value(json!({
            "metadata": {"name": name, "annotations": annotations}, "driver": driver,
        }))
        .unwrap()
    }

    fn of(classes: Vec<DynamicObject>) -> Option<String> {
        let drivers = BTreeMap::from([("fast".to_owned(), "d".to_owned())]);
        let spec = serde_json::from_value(json!({"storageClassName": "fast"})).unwrap();
        Classes::of_all(drivers, classes).of_spec(&spec)
    }

    #[test]
    fn a_drivers_only_class_or_its_default_is_taken() {
        assert_eq!(of(vec![class("x", "other", true)]), None);
        let one = vec![class("a", "d", false), class("x", "other", false)];
        assert_eq!(of(one).as_deref(), Some("a"));
        let two = vec![class("a", "d", false), class("b", "d", true)];
        assert_eq!(of(two).as_deref(), Some("b"));
        let unclear = vec![class("a", "d", false), class("b", "d", false)];
        assert_eq!(of(unclear), None);
    }

    #[test]
    fn claims_without_a_volume_or_a_class_are_left_out() {
        let drivers = BTreeMap::from([("fast".to_owned(), "d".to_owned())]);
        let classes = Classes::of_all(drivers, vec![class("a", "d", false)]);
        let claim = |class: &str, phase: &str| -> PersistentVolumeClaim {
            serde_json::from_value(json!({
                "spec": {"storageClassName": class}, "status": {"phase": phase},
            }))
            .unwrap()
        };
        assert_eq!(classes.of(&claim("fast", "Bound")).as_deref(), Some("a"));
        assert_eq!(classes.of(&claim("fast", "Pending")), None);
        assert_eq!(classes.of(&claim("slow", "Bound")), None);
        assert_eq!(classes.of(&PersistentVolumeClaim::default()), None);
    }
}
