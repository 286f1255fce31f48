//! Requests and limits of the pod (`spec.domain.resources`).

use std::collections::BTreeMap;

use super::{Memory, VmiSpec};
use crate::{
    Causes, ClusterConfig, ClusterDefaults, FieldPath, Quantity, cause::shown, quantity::Amount,
};

/// A memory request below this is a mistake: a forgotten unit.
const MIN_MEMORY: Amount = Amount::whole(1_000_000);

/// Kubernetes' own CPU request where none is given.
const USUAL_CPU_REQUEST: &str = "100m";

object! {
    /// Requests and limits.
    pub struct Resources {
        /// What the pod is scheduled by.
        pub requests: BTreeMap<String, Quantity>,
        /// What the pod may use.
        pub limits: BTreeMap<String, Quantity>,
        /// Leaves the overhead out of the pod's request.
        pub overcommit_guest_overhead: Option<bool>,
    }
}

pub(super) fn apply_defaults(resources: &mut Resources, defaults: &ClusterDefaults) {
    if resources.requests.contains_key("cpu") {
        return;
    }
    let cluster = defaults
        .cpu_request
        .as_ref()
        .filter(|cpu| cpu.as_str() != USUAL_CPU_REQUEST);
    if let Some(cpu) = resources.limits.get("cpu").or(cluster) {
        resources.requests.insert("cpu".to_owned(), cpu.clone());
    }
}

pub(super) fn validate(
    spec: &VmiSpec,
    config: &ClusterConfig,
    domain: &FieldPath,
    causes: &mut Causes,
) {
    let resources = &spec.domain.resources;
    let path = domain.child("resources");
    let mut read = |kind: &str, name: &str, list: &BTreeMap<String, Quantity>| {
        let quantity = list.get(name)?;
        read_quantity(quantity, &path.child(kind).child(name), causes)
    };
    let request = read("requests", "memory", &resources.requests);
    let limit = read("limits", "memory", &resources.limits);
    let cpu_request = read("requests", "cpu", &resources.requests);
    let cpu_limit = read("limits", "cpu", &resources.limits);

    let request_path = path.child("requests.memory");
    if request.is_some_and(|request| request > Amount::ZERO && request < MIN_MEMORY) {
        let given = resources
            .requests
            .get("memory")
            .map_or("", Quantity::as_str);
        let message = format_args!("is {}, but must be at least 1M", shown(given)).to_string();
        causes.invalid(&request_path, message);
    }
    exceeds(
        request,
        limit,
        &request_path,
        &path.child("limits.memory"),
        causes,
    );
    exceeds(
        cpu_request,
        cpu_limit,
        &path.child("requests.cpu"),
        &path.child("limits.cpu"),
        causes,
    );
    validate_memory(spec, config, limit, domain, causes);
}

/// Huge pages, guest memory, and that there is any memory.
fn validate_memory(
    spec: &VmiSpec,
    config: &ClusterConfig,
    limit: Option<Amount>,
    domain: &FieldPath,
    causes: &mut Causes,
) {
    let requests_memory = spec.domain.resources.requests.get("memory");
    let Memory {
        guest,
        max_guest,
        hugepages,
        ..
    } = spec.domain.memory.clone().unwrap_or_default();
    let page_size = hugepages.and_then(|pages| pages.page_size);
    let path = domain.child("memory");

    if guest.is_none() && requests_memory.is_none() && page_size.is_none() {
        causes.required(
            &path.child("guest"),
            "is required: no memory is given by requests, guest memory or huge pages",
        );
        return;
    }
    let guest_amount = guest
        .as_ref()
        .and_then(|guest| read_quantity(guest, &path.child("guest"), causes));
    if guest_amount == Some(Amount::ZERO) {
        causes.invalid(&path.child("guest"), "is zero, but a guest needs memory");
    }
    if !config.live_update {
        exceeds(
            guest_amount,
            limit,
            &path.child("guest"),
            &domain.child("resources.limits.memory"),
            causes,
        );
    }
    if let Some(max) = &max_guest {
        let max = read_quantity(max, &path.child("maxGuest"), causes);
        exceeds(
            guest_amount,
            max,
            &path.child("guest"),
            &path.child("maxGuest"),
            causes,
        );
    }
    if let Some(page_size) = page_size {
        validate_page_size(&page_size, guest_amount, domain, causes);
    }
}

fn validate_page_size(
    page_size: &Quantity,
    guest: Option<Amount>,
    domain: &FieldPath,
    causes: &mut Causes,
) {
    let path = domain.child("memory.hugepages.pageSize");
    let Some(size) = read_quantity(page_size, &path, causes) else {
        return;
    };
    if size.ceil() != 2 << 20 && size.ceil() != 1 << 30 {
        causes.not_supported(
            &path,
            format_args!("is {}, but must be 2Mi or 1Gi", shown(page_size.as_str())),
        );
        return;
    }
    let Some(guest) = guest else { return };
    if guest < size || guest.ceil() % size.ceil() != 0 {
        causes.invalid(
            &domain.child("resources.requests.memory"),
            format_args!(
                "must be a multiple of the page size {}, as the guest's memory is in huge pages",
                page_size.as_str()
            ),
        );
    }
}

/// Reads a quantity that must not be negative.
pub(super) fn read_quantity(
    quantity: &Quantity,
    path: &FieldPath,
    causes: &mut Causes,
) -> Option<Amount> {
    let text = shown(quantity.as_str());
    match quantity.amount() {
        Ok(amount) if amount.is_negative() => {
            causes.invalid(path, format_args!("is {text}, but must not be negative"));
            None
        }
        Ok(amount) => Some(amount),
        Err(error) => {
            causes.invalid(path, format_args!("is {text}, which {error}"));
            None
        }
    }
}

fn exceeds(
    small: Option<Amount>,
    large: Option<Amount>,
    small_path: &FieldPath,
    large_path: &FieldPath,
    causes: &mut Causes,
) {
    if let (Some(small), Some(large)) = (small, large)
        && small > large
    {
        causes.invalid(
            small_path,
            format_args!("must not be greater than {large_path}"),
        );
    }
}
