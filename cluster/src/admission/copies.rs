//! Asks whether somebody may copy a claim of another namespace, and says so to the controller.
//!
//! A DataVolume gets a token, whatever annotation its author gave. Who is asked is its author; of
//! one that our controller makes for a virtual machine, the machine's service account, which
//! whoever makes machines could give to a pod.

use std::time::SystemTime;

use podvisor_cluster_types::{
    Cause, Causes, FieldPath,
    datavolume::{DataVolumeSpec, ForeignSource, SourceKind},
    vm::VmSpec,
};
use serde_json::{Value, json};

use super::{Policy, Request, Response, User, lookup::Lookup, lookup::part, mutate::patched};
use crate::{
    copy::{ACCOUNT, DEFAULT_ACCOUNT, Grant, TOKEN},
    token::KeyStore,
};

/// The answer of the mutating webhook for a new DataVolume.
pub(super) async fn authorize(
    request: &Request,
    policy: &Policy,
    lookup: &impl Lookup,
    keys: &KeyStore,
) -> Response {
    let mut object = request.object.clone();
    let annotations = object.pointer_mut("/metadata/annotations");
    if let Some(annotations) = annotations.and_then(Value::as_object_mut) {
        annotations.remove(TOKEN);
    }
    let namespace = &request.namespace;
    // What is invalid is refused by the validating webhook, with every cause.
    let spec: DataVolumeSpec = part(&object, "spec").unwrap_or_default();
    let is_valid = spec
        .validate_in(namespace, &FieldPath::new("spec"))
        .is_empty();
    let Some(source) = spec.foreign_source(namespace).filter(|_| is_valid) else {
        return patched(&request.object, &object);
    };
    let user = asked(request, policy);
    match refusal(&user, &source, lookup).await {
        Ok(None) => {}
        Ok(Some(message)) => {
            return Response::Refused {
                code: 403,
                reason: "Forbidden",
                message,
            };
        }
        Err(error) => return failed(&error),
    }
    let name = request.meta().name;
    if name.is_empty() {
        let mut causes = Causes::default();
        let message = "is required for a copy of another namespace";
        causes.required(&FieldPath::new("metadata.name"), message);
        return Response::Invalid(causes.into_vec());
    }
    let grant = Grant {
        namespace: namespace.clone(),
        name,
        source_namespace: source.namespace,
        source_kind: source.kind.name().to_owned(),
        source_name: source.name,
    };
    let is_dry = request.dry_run == Some(true);
    let key = match is_dry {
        true => keys.key().await,
        false => keys.key_or_new().await,
    };
    match key {
        // What is not stored needs none.
        Err(_) if is_dry => patched(&request.object, &object),
        Ok(key) => {
            let token = key.sign(grant, SystemTime::now());
            let metadata = &mut object["metadata"];
            if !metadata["annotations"].is_object() {
                metadata["annotations"] = json!({});
            }
            metadata["annotations"][TOKEN] = token.into();
            patched(&request.object, &object)
        }
        Err(error) => failed(&error),
    }
}

/// Causes to refuse a virtual machine whose templates copy what its account may not.
pub(super) async fn templates(
    request: &Request,
    spec: &VmSpec,
    lookup: &impl Lookup,
) -> Result<Vec<Cause>, Response> {
    let namespace = &request.namespace;
    let old: VmSpec = part(&request.old_object, "spec").unwrap_or_default();
    let known = old.foreign_sources(namespace);
    let is_known = |source: &ForeignSource| {
        old.account() == spec.account() && known.iter().any(|(_, known)| known == source)
    };
    let mut causes = Causes::default();
    let user = account(namespace, spec.account());
    for (index, source) in spec.foreign_sources(namespace) {
        if is_known(&source) {
            continue;
        }
        let refused = refusal(&user, &source, lookup).await;
        if let Some(message) = refused.map_err(|error| failed(&error))? {
            let path = FieldPath::new("spec");
            let path = path.child("dataVolumeTemplates").index(index);
            causes.forbidden(&path, message);
        }
    }
    Ok(causes.into_vec())
}

/// Who has to have the right to a DataVolume's source.
fn asked(request: &Request, policy: &Policy) -> User {
    if !policy.is_system(&request.user_info) {
        return request.user_info.clone();
    }
    let annotations = request.meta().annotations;
    let name = annotations.get(ACCOUNT).map(String::as_str);
    account(&request.namespace, name.unwrap_or(DEFAULT_ACCOUNT))
}

/// A service account as the API server knows it.
pub(super) fn account(namespace: &str, name: &str) -> User {
    User {
        username: format!("system:serviceaccount:{namespace}:{name}"),
        groups: vec![
            "system:serviceaccounts".to_owned(),
            format!("system:serviceaccounts:{namespace}"),
            "system:authenticated".to_owned(),
        ],
        ..User::default()
    }
}

/// Why a user may not copy a source.
pub(super) async fn refusal(
    user: &User,
    source: &ForeignSource,
    lookup: &impl Lookup,
) -> Result<Option<String>, kube::Error> {
    let ForeignSource {
        namespace,
        kind,
        name,
    } = source;
    // A DataSource may name any claim of its namespace by the time of the copy.
    let claim = (*kind == SourceKind::Claim).then_some(name.as_str());
    if lookup.may_copy(user, namespace, claim).await? {
        return Ok(None);
    }
    let (user, kind) = (&user.username, kind.name());
    Ok(Some(format!(
        "user \"{user}\" cannot create resource \"datavolumes/source\" in API group \
         \"cdi.kubevirt.io\" in the namespace \"{namespace}\", which copies of its {kind} {name} \
         need"
    )))
}

fn failed(error: &(dyn std::error::Error + 'static)) -> Response {
    tracing::error!(error, "failed to ask whether a claim may be copied");
    Response::Refused {
        code: 500,
        reason: "InternalError",
        message: "it cannot be found out whether the source may be copied: try again".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(user: &str, annotations: Value) -> Request {
        let object = json!({ "metadata": { "name": "a", "annotations": annotations } });
        let mut request = Request {
            namespace: "n".to_owned(),
            object,
            ..Request::default()
        };
        request.user_info.username = user.to_owned();
        request
    }

    #[test]
    fn an_author_is_asked_and_for_a_machine_its_account() {
        let policy = Policy::new(Default::default(), "podvisor");
        let asked = |user: &str, annotations| asked(&request(user, annotations), &policy).username;
        let own = "system:serviceaccount:podvisor:podvisor-controller";
        assert_eq!(asked("ann", json!({ ACCOUNT: "strong" })), "ann");
        assert_eq!(asked(own, json!({})), "system:serviceaccount:n:default");
        let named = asked(own, json!({ ACCOUNT: "disks" }));
        assert_eq!(named, "system:serviceaccount:n:disks");
    }
}
