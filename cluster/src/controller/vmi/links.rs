//! Links of an instance's cards, which change while its VM runs: `interfaces[].state` says how they
//! are to be, and `status.interfaces[].linkState` how they are.

use std::time::Duration;

use podvisor_cluster_types::vmi::VmiSpec;
use serde_json::{Value, json};

use super::pod;
use crate::contact::links::LinksRequest;
use crate::controller::error::Error;
use crate::controller::{Context, patch};
use crate::objects::{Interface, MigrationState, Phase, VirtualMachineInstance, VmiStatus};

/// When a node is asked again that did not do it.
const RETRY: Duration = Duration::from_secs(10);

const STATE: &str = "linkState";

/// Writes how the links of a machine's cards are that begins as its specification says, once.
pub(super) fn set_at_boot(status: &mut VmiStatus, spec: &VmiSpec) {
    let is_known = |one: &Interface| one.rest.contains_key(STATE);
    if !status.interfaces.iter().any(is_known) {
        report(status, spec);
    }
}

/// Has the node give and take links as an instance's specification says; returns when to look
/// again, if nothing else leads to it.
pub(super) async fn keep(
    vmi: &VirtualMachineInstance,
    context: &Context,
) -> Result<Option<Duration>, Error> {
    let moves = vmi.status.migration_state.as_ref();
    let moves = moves.is_some_and(MigrationState::is_open);
    let runs = vmi.status.phase == Phase::Running && vmi.metadata.deletion_timestamp.is_none();
    let (true, false, Ok(spec)) = (runs, moves, pod::specification(vmi)) else {
        return Ok(None);
    };
    let mut status = vmi.status.clone();
    report(&mut status, &spec);
    if status == vmi.status {
        return Ok(None);
    }
    let cards = spec.domain.devices.interfaces.iter();
    let down = cards.filter(|card| card.is_down());
    let with = LinksRequest {
        down: down.map(|card| card.name.clone()).collect(),
    };
    if let Err(error) = context.nodes.change(vmi, "links", &with).await {
        context
            .warn(vmi, "LinkStateFailed", "SetLinks", error.to_string())
            .await;
        return Ok(Some(RETRY));
    }
    let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
    let api = context.world.api(namespace);
    if let Some(written) = patch::status(&api, vmi, &vmi.status, &status).await? {
        context.expectations.wrote(&written);
    }
    Ok(None)
}

/// Writes that all links are as the specification says.
fn report(status: &mut VmiStatus, spec: &VmiSpec) {
    let cards = spec.domain.devices.interfaces.iter();
    for card in cards.filter(|card| !card.is_absent()) {
        let state = if card.is_down() { "down" } else { "up" };
        let known = status
            .interfaces
            .iter_mut()
            .find(|one| one.name == card.name);
        match known {
            Some(one) => {
                one.rest.insert(STATE.to_owned(), json!(state));
            }
            None => status.interfaces.push(Interface {
                name: card.name.clone(),
                rest: [(STATE.to_owned(), Value::from(state))]
                    .into_iter()
                    .collect(),
                ..Interface::default()
            }),
        }
    }
}
