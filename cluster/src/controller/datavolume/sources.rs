//! What DataVolumes are made of that name a DataSource or a snapshot.

use std::collections::HashMap;
use std::sync::Arc;

use kube::Api;
use podvisor_cluster_types::datavolume::{DataVolumeSource, ForeignSource, ObjectSource};
use podvisor_cluster_types::names::is_dns_subdomain;

use crate::controller::Context;
use crate::controller::error::Error;
use crate::objects::{DataSource, DataVolume, VolumeSnapshot};

/// So many DataSources lead to each other at most.
const DEPTH: usize = 4;

/// A DataVolume with its source, or why it has none.
#[derive(Debug)]
pub(super) struct Resolved {
    /// The DataVolume, whose specification names its source itself.
    pub(super) volume: DataVolume,
    /// Why nothing can be made of it now.
    pub(super) obstacle: Option<String>,
}

impl Resolved {
    /// A DataVolume whose source is not asked for.
    pub(super) fn as_it_is(volume: &DataVolume) -> Self {
        Self {
            volume: volume.clone(),
            obstacle: None,
        }
    }
}

/// Finds what a DataVolume is made of.
pub(super) async fn resolve(
    observed: &DataVolume,
    has_claim: bool,
    context: &Context,
) -> Result<Resolved, Error> {
    let mut resolved = Resolved::as_it_is(observed);
    let namespace = observed.metadata.namespace.as_deref().unwrap_or_default();
    if let Some(reference) = &observed.spec.source_ref {
        let followed = match observed.spec.foreign_source(namespace) {
            Some(source) => follow_elsewhere(observed, &source, context).await?,
            None => {
                let find = |name: &str| context.world.source(namespace, name);
                follow(namespace, &reference.name, &find)
            }
        };
        match followed {
            Ok(source) => resolved.volume.spec.source = Some(source),
            Err(why) => resolved.obstacle = Some(why),
        }
    }
    let source = resolved.volume.spec.source.as_ref();
    if let Some(snapshot) = source.and_then(|source| source.snapshot.clone())
        && !has_claim
    {
        if !snapshot.is_in(namespace) {
            let name = &snapshot.name;
            resolved.obstacle = Some(format!("VolumeSnapshot {name} is of another namespace"));
            return Ok(resolved);
        }
        let api: Api<VolumeSnapshot> = context.world.api(namespace);
        let found = api.get_opt(&snapshot.name).await;
        let found =
            found.map_err(|source| Error::request("look for the source of", observed, source))?;
        match found {
            Some(found) if found.status.ready_to_use == Some(true) => {
                if let Some(size) = &found.status.restore_size {
                    resolved.volume.spec.default_size(size);
                }
            }
            Some(_) => {
                let name = &snapshot.name;
                resolved.obstacle = Some(format!("VolumeSnapshot {name} is not ready to use"));
            }
            None => {
                let name = &snapshot.name;
                resolved.obstacle = Some(format!("VolumeSnapshot {name} does not exist"));
            }
        }
    }
    Ok(resolved)
}

/// Returns what a DataSource of another namespace names there.
async fn follow_elsewhere(
    volume: &DataVolume,
    source: &ForeignSource,
    context: &Context,
) -> Result<Result<DataVolumeSource, String>, Error> {
    let namespace = source.namespace.as_str();
    let api: Api<DataSource> = context.world.api(namespace);
    let mut known: HashMap<String, Arc<DataSource>> = HashMap::new();
    let mut next = Some(source.name.clone());
    while let Some(name) = next.take().filter(|name| !known.contains_key(name)) {
        let found = api.get_opt(&name).await;
        let found =
            found.map_err(|source| Error::request("look for the source of", volume, source))?;
        if let Some(found) = found {
            let named = found.spec.source.as_ref();
            let named = named.and_then(|source| source.data_source.as_ref());
            next = named
                .filter(|_| known.len() < DEPTH)
                .map(|named| named.name.clone());
            known.insert(name, Arc::new(found));
        }
    }
    let find = |name: &str| known.get(name).cloned();
    Ok(follow(namespace, &source.name, &find).map(|mut found| {
        for named in [&mut found.pvc, &mut found.snapshot].into_iter().flatten() {
            named.namespace = Some(namespace.to_owned());
        }
        found
    }))
}

/// Returns what a DataSource stands for.
pub(in crate::controller) fn follow(
    namespace: &str,
    name: &str,
    find: &dyn Fn(&str) -> Option<Arc<DataSource>>,
) -> Result<DataVolumeSource, String> {
    let mut name = name.to_owned();
    for _ in 0..DEPTH {
        let Some(found) = find(&name) else {
            return Err(format!("DataSource {name} does not exist"));
        };
        let source = found.spec.source.clone().unwrap_or_default();
        let is_own = |of: &ObjectSource| of.is_in(namespace);
        let all = [&source.pvc, &source.snapshot, &source.data_source];
        if !all.into_iter().flatten().all(is_own) {
            return Err(format!(
                "DataSource {name} names an object of another namespace"
            ));
        }
        let is_named = |of: &ObjectSource| is_dns_subdomain(&of.name);
        if !all.into_iter().flatten().all(is_named) {
            return Err(format!("DataSource {name} names no object"));
        }
        match (source.pvc, source.snapshot, source.data_source) {
            (Some(claim), None, None) => {
                return Ok(DataVolumeSource {
                    pvc: Some(claim),
                    ..DataVolumeSource::default()
                });
            }
            (None, Some(snapshot), None) => {
                return Ok(DataVolumeSource {
                    snapshot: Some(snapshot),
                    ..DataVolumeSource::default()
                });
            }
            (None, None, Some(next)) => name = next.name,
            _ => return Err(format!("DataSource {name} names nothing yet")),
        }
    }
    Err(format!(
        "DataSource {name} leads through more than {DEPTH} others"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn follow_all(sources: &[(&str, Value)]) -> Result<DataVolumeSource, String> {
        let find = |name: &str| {
            let (_, source) = sources.iter().find(|(known, _)| *known == name)?;
            let object = json!({"spec": {"source": source}});
            Some(Arc::new(serde_json::from_value(object).unwrap()))
        };
        follow("n", "a", &find)
    }

    #[test]
    fn names_lead_to_a_claim_or_a_snapshot() {
        let claim = json!({"pvc": {"name": "c", "namespace": "n"}});
        let found = follow_all(&[("a", claim)]).unwrap();
        assert_eq!(found.pvc.unwrap().name, "c");
        let next = json!({"dataSource": {"name": "b"}});
        let snapshot = json!({"snapshot": {"name": "s"}});
        let found = follow_all(&[("a", next.clone()), ("b", snapshot)]).unwrap();
        assert_eq!(found.snapshot.unwrap().name, "s");
        assert!(
            follow_all(&[("a", next)])
                .unwrap_err()
                .contains("b does not exist")
        );
    }

    #[test]
    fn names_that_lead_nowhere_end() {
        let round = json!({"dataSource": {"name": "a"}});
        assert!(
            follow_all(&[("a", round)])
                .unwrap_err()
                .contains("more than")
        );
        assert!(
            follow_all(&[("a", json!({}))])
                .unwrap_err()
                .contains("nothing yet")
        );
        let other = json!({"pvc": {"name": "c", "namespace": "m"}});
        assert!(
            follow_all(&[("a", other)])
                .unwrap_err()
                .contains("another namespace")
        );
    }
}
