//! The user namespace of a pod (`hostUsers: false`): a range of ids that the kubelet assigns, for
//! all of its containers and volumes.

use oci_spec::OciSpecError;
use oci_spec::runtime::{LinuxIdMapping, LinuxIdMappingBuilder};
use podvisor_cri_messages::{
    IdMapping, LinuxContainerSecurityContext, NamespaceMode, NamespaceOption,
};

use super::fault::SpecFault;
use crate::machine::UserRange;

const FIELD: &str = "namespace_options.userns_options (hostUsers: false)";

/// Returns the ids of a pod's users; `None` if they are the guest's.
pub(super) fn users(options: Option<&NamespaceOption>) -> Result<Option<UserRange>, SpecFault> {
    let Some(users) = options.and_then(|options| options.userns_options.as_ref()) else {
        return Ok(None);
    };
    match NamespaceMode::try_from(users.mode) {
        Ok(NamespaceMode::Node) if users.uids.is_empty() && users.gids.is_empty() => Ok(None),
        Ok(NamespaceMode::Node) => Err(SpecFault::invalid(
            FIELD,
            "the mode NODE has no mappings: leave them out, or take POD",
        )),
        Ok(NamespaceMode::Pod) => {
            let is_nodes = |mode: i32| mode == i32::from(NamespaceMode::Node);
            if options.is_some_and(|options| is_nodes(options.pid)) {
                return Err(SpecFault::invalid(
                    FIELD,
                    "it contradicts namespace_options.pid NODE (hostPID)",
                ));
            }
            range(&users.uids, &users.gids, FIELD).map(Some)
        }
        Ok(_) | Err(_) => {
            let reason = format!("{} is neither POD nor NODE", users.mode);
            Err(SpecFault::invalid(FIELD, reason))
        }
    }
}

/// Checks that a container's users are those of its pod, which is the default.
pub(super) fn check_container(
    security: &LinuxContainerSecurityContext,
    pod: Option<UserRange>,
) -> Result<(), SpecFault> {
    let options = security.namespace_options.as_ref();
    let is_said = options.is_some_and(|options| options.userns_options.is_some());
    if is_said && users(options)? != pod {
        return Err(SpecFault::invalid(FIELD, "it is not that of the pod"));
    }
    Ok(())
}

/// Checks that a volume's mappings, if it has any, are those of its pod.
pub(super) fn check_mount(
    uids: &[IdMapping],
    gids: &[IdMapping],
    pod: Option<UserRange>,
) -> Result<(), SpecFault> {
    const FIELD: &str = "mounts.uid_mappings and gid_mappings";
    if uids.is_empty() && gids.is_empty() {
        return Ok(());
    }
    let Some(pod) = pod else {
        return Err(SpecFault::invalid(FIELD, "the pod has no user namespace"));
    };
    match range(uids, gids, FIELD)? == pod {
        true => Ok(()),
        false => Err(SpecFault::invalid(FIELD, "they are not those of the pod")),
    }
}

fn range(
    uids: &[IdMapping],
    gids: &[IdMapping],
    field: &'static str,
) -> Result<UserRange, SpecFault> {
    let ([uid], [gid]) = (uids, gids) else {
        let reason = format!(
            "it has {} mappings of users and {} of groups, but takes one of each",
            uids.len(),
            gids.len()
        );
        return Err(SpecFault::invalid(field, reason));
    };
    if uid != gid {
        return Err(SpecFault::invalid(
            field,
            "users and groups are mapped differently: map them alike",
        ));
    }
    let range = UserRange {
        first: uid.host_id,
        count: uid.length,
    };
    if uid.container_id != 0 || !range.is_valid() {
        let reason = format!(
            "{} ids from {} on for those from {} on of the container: a mapping is of the \
             container's 0, not to the host's 0, of at least one id and none above 4294967293",
            uid.length, uid.host_id, uid.container_id
        );
        return Err(SpecFault::invalid(field, reason));
    }
    Ok(range)
}

/// Returns the mapping for a specification.
pub(super) fn mappings(range: UserRange) -> Result<Vec<LinuxIdMapping>, OciSpecError> {
    let mapping = LinuxIdMappingBuilder::default()
        .container_id(0u32)
        .host_id(range.first)
        .size(range.count)
        .build()?;
    Ok(vec![mapping])
}

#[cfg(test)]
#[path = "users_tests.rs"]
mod tests;
