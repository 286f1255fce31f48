//! Changes of a template that its instance takes while it runs: more sockets, more memory, and the
//! links of its cards.

use podvisor_cluster_types::Quantity;
use serde_json::{Map, Value, json};

use crate::controller::vmi::without_plugged;
use crate::objects::{MigrationState, Phase, VirtualMachineInstance};

const SOCKETS: &str = "/domain/cpu/sockets";
const GUEST: &str = "/domain/memory/guest";
const CARDS: &str = "/domain/devices/interfaces";

/// What a changed template means for the instance that was started with another one.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Live {
    /// The change of the instance's specification, as a merge patch of it.
    pub(super) patch: Option<Value>,
    /// The rest of the change takes a restart.
    pub(super) needs_restart: bool,
}

/// Compares a template with the one that an instance was started with. Where changes are not live
/// (`vmRolloutStrategy`), each takes a restart.
pub(super) fn compare(
    template: Option<&Value>,
    started: &Value,
    vmi: &VirtualMachineInstance,
    is_live: bool,
) -> Live {
    let restart = Live {
        patch: None,
        needs_restart: true,
    };
    let Some(template) = template else {
        return restart;
    };
    let (template, started) = (
        without_plugged(template.clone()),
        without_plugged(started.clone()),
    );
    if !is_live {
        return Live {
            patch: None,
            needs_restart: template != started,
        };
    }
    let mut domain = Map::new();
    let sockets = more_sockets(&template, &started, &vmi.spec);
    let guest = more_memory(&template, &started, &vmi.spec);
    let mut needs_restart = fixed(&template) != fixed(&started);
    match sockets {
        Ok(Some(sockets)) => {
            domain.insert("cpu".to_owned(), json!({ "sockets": sockets }));
        }
        Ok(None) => {}
        Err(Restart) => needs_restart = true,
    }
    match guest {
        Ok(Some(guest)) => {
            domain.insert("memory".to_owned(), json!({ "guest": guest }));
        }
        Ok(None) => {}
        Err(Restart) => needs_restart = true,
    }
    if let Some(cards) = other_links(&template, &vmi.spec) {
        domain.insert("devices".to_owned(), json!({ "interfaces": cards }));
    }
    let moves = vmi.status.migration_state.as_ref();
    let may_change = vmi.status.phase == Phase::Running
        && vmi.metadata.deletion_timestamp.is_none()
        && !moves.is_some_and(MigrationState::is_open);
    Live {
        patch: (may_change && !domain.is_empty()).then(|| json!({"spec": {"domain": domain}})),
        needs_restart,
    }
}

/// A change that takes a restart.
struct Restart;

/// Returns the sockets that the instance is to have, if there are to be more.
fn more_sockets(template: &Value, started: &Value, vmi: &Value) -> Result<Option<i64>, Restart> {
    let of = |spec: &Value, path| spec.pointer(path).and_then(Value::as_i64);
    let Some(wanted) = of(template, SOCKETS) else {
        // It is the default, or an instance type's.
        return match started.pointer(SOCKETS) {
            None => Ok(None),
            Some(_) => Err(Restart),
        };
    };
    let now = of(vmi, SOCKETS).unwrap_or(1);
    let most = of(vmi, "/domain/cpu/maxSockets").unwrap_or(now);
    match wanted {
        _ if wanted == now => Ok(None),
        _ if wanted > now && wanted <= most => Ok(Some(wanted)),
        _ => Err(Restart),
    }
}

/// Returns the memory that the instance is to have, if there is to be more.
fn more_memory(template: &Value, started: &Value, vmi: &Value) -> Result<Option<String>, Restart> {
    let of = |spec: &Value, path| {
        let text = spec.pointer(path).and_then(Value::as_str)?;
        Quantity::new(text).bytes()
    };
    let Some(wanted) = of(template, GUEST) else {
        return match template.pointer(GUEST) == started.pointer(GUEST) {
            true => Ok(None),
            false => Err(Restart),
        };
    };
    let now = of(vmi, GUEST).ok_or(Restart)?;
    let most = of(vmi, "/domain/memory/maxGuest").unwrap_or(now);
    let text = template.pointer(GUEST).and_then(Value::as_str);
    match wanted {
        _ if wanted == now => Ok(None),
        _ if wanted > now && wanted <= most => Ok(text.map(str::to_owned)),
        _ => Err(Restart),
    }
}

/// Returns the instance's cards with the links that the template says, if they are others.
fn other_links(template: &Value, vmi: &Value) -> Option<Value> {
    let of_template = template.pointer(CARDS)?.as_array()?;
    let mut cards = vmi.pointer(CARDS)?.clone();
    let mut is_other = false;
    for card in cards
        .as_array_mut()?
        .iter_mut()
        .filter_map(Value::as_object_mut)
    {
        let wanted = of_template
            .iter()
            .find(|one| one.get("name") == card.get("name"));
        let Some(wanted) = wanted.filter(|wanted| is_link(wanted.get("state"))) else {
            continue;
        };
        if !is_link(card.get("state")) || is_down(wanted.get("state")) == is_down(card.get("state"))
        {
            continue;
        }
        is_other = true;
        match wanted.get("state") {
            Some(state) => card.insert("state".to_owned(), state.clone()),
            None => card.remove("state"),
        };
    }
    is_other.then_some(cards)
}

fn is_down(state: Option<&Value>) -> bool {
    state.and_then(Value::as_str) == Some("down")
}

/// Whether a card's state is that of a link. A card that comes or goes takes a restart.
fn is_link(state: Option<&Value>) -> bool {
    state.is_none_or(|state| ["", "up", "down"].map(Some).contains(&state.as_str()))
}

/// Returns a specification without what may change while it runs, and without parts that are empty
/// then.
fn fixed(spec: &Value) -> Value {
    let mut spec = spec.clone();
    for (part, field) in [("cpu", "sockets"), ("memory", "guest")] {
        let Some(Value::Object(domain)) = spec.pointer_mut("/domain") else {
            continue;
        };
        if let Some(Value::Object(part)) = domain.get_mut(part) {
            part.remove(field);
        }
        if domain.get(part) == Some(&json!({})) {
            domain.remove(part);
        }
    }
    let cards = spec.pointer_mut(CARDS).and_then(Value::as_array_mut);
    for card in cards.into_iter().flatten() {
        if let Some(card) = card.as_object_mut()
            && is_link(card.get("state"))
        {
            card.remove("state");
        }
    }
    spec
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vmi(domain: Value) -> VirtualMachineInstance {
        let given = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": {"name": "a"},
            "spec": {"domain": domain},
            "status": {"phase": "Running"},
        });
        serde_json::from_value(given).unwrap()
    }

    fn template(sockets: i64, guest: &str) -> Value {
        json!({"domain": {"cpu": {"sockets": sockets}, "memory": {"guest": guest}}})
    }

    fn of(wanted: &Value, is_live: bool) -> Live {
        let vmi = vmi(json!({
            "cpu": {"cores": 1, "sockets": 2, "threads": 1, "maxSockets": 4},
            "memory": {"guest": "1Gi", "maxGuest": "4Gi"},
        }));
        compare(Some(wanted), &template(1, "1Gi"), &vmi, is_live)
    }

    #[test]
    fn more_sockets_and_memory_up_to_the_bounds_are_live() {
        let live = of(&template(4, "4096Mi"), true);
        let domain = json!({"cpu": {"sockets": 4}, "memory": {"guest": "4096Mi"}});
        assert_eq!(live.patch, Some(json!({"spec": {"domain": domain}})));
        assert!(!live.needs_restart);
        // The instance has as many already.
        assert_eq!(of(&template(2, "1024Mi"), true), Live::default());
    }

    #[test]
    fn what_cannot_be_plugged_in_takes_a_restart() {
        for (sockets, guest) in [
            (1, "1Gi"),
            (5, "1Gi"),
            (2, "512Mi"),
            (2, "5Gi"),
            (2, "much"),
        ] {
            let live = of(&template(sockets, guest), true);
            assert!(
                live.needs_restart && live.patch.is_none(),
                "{sockets} {guest}"
            );
        }
        // What can be is done nevertheless.
        let both = of(&template(3, "512Mi"), true);
        assert!(both.needs_restart && both.patch.is_some());
        let mut cores = template(2, "1Gi");
        cores["domain"]["cpu"]["cores"] = json!(2);
        assert!(of(&cores, true).needs_restart);
        assert!(of(&json!({"domain": {}}), true).needs_restart);
    }

    #[test]
    fn links_are_live() {
        let cards = |first: Value, second: Value| {
            let mut cards = json!([{"name": "a", "bridge": {}}, {"name": "b", "bridge": {}}]);
            for (index, state) in [first, second].into_iter().enumerate() {
                if !state.is_null() {
                    cards[index]["state"] = state;
                }
            }
            json!({"domain": {"devices": {"interfaces": cards}}})
        };
        let of = |wanted: &Value, started: &Value, now: &Value| {
            compare(Some(wanted), started, &vmi(now["domain"].clone()), true)
        };
        let (none, down) = (
            cards(Value::Null, Value::Null),
            cards(json!("down"), json!("up")),
        );
        let live = of(&down, &none, &none);
        assert_eq!(
            live.patch,
            Some(json!({"spec": cards(json!("down"), Value::Null)}))
        );
        assert!(!live.needs_restart);
        assert_eq!(of(&down, &none, &down), Live::default());
        // A link is what a card has that says nothing.
        let live = of(&none, &down, &down);
        assert_eq!(
            live.patch,
            Some(json!({"spec": cards(Value::Null, json!("up"))}))
        );
        assert!(!live.needs_restart);
        // A card that comes or goes takes a restart.
        let absent = cards(json!("absent"), Value::Null);
        for (wanted, started) in [(&absent, &none), (&none, &absent)] {
            let live = of(wanted, started, started);
            assert!(live.needs_restart && live.patch.is_none());
        }
        assert!(compare(Some(&down), &none, &vmi(none["domain"].clone()), false).needs_restart);
    }

    #[test]
    fn without_live_changes_each_one_takes_a_restart() {
        let live = of(&template(4, "1Gi"), false);
        assert!(live.needs_restart && live.patch.is_none());
        assert!(!of(&template(1, "1Gi"), false).needs_restart);
    }

    #[test]
    fn nothing_changes_while_an_instance_begins_or_moves() {
        let started = template(1, "1Gi");
        let mut begins =
            vmi(json!({"cpu": {"sockets": 1, "maxSockets": 4}, "memory": {"guest": "1Gi"}}));
        let wanted = template(2, "1Gi");
        assert!(
            compare(Some(&wanted), &started, &begins, true)
                .patch
                .is_some()
        );
        begins.status.phase = Phase::Scheduled;
        assert_eq!(
            compare(Some(&wanted), &started, &begins, true),
            Live::default()
        );
    }
}
