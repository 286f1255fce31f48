//! Name resolution (`spec.dnsPolicy`, `spec.dnsConfig`).

use std::net::IpAddr;

use super::VmiSpec;
use crate::{Causes, FieldPath, cause::shown};

const MAX_NAMESERVERS: usize = 3;
const MAX_SEARCHES: usize = 6;
const MAX_SEARCH_CHARACTERS: usize = 256;

object! {
    /// As a pod's.
    pub struct DnsConfig {
        /// Addresses of name servers.
        pub nameservers: Vec<String>,
        /// Domains that short names are looked up in.
        pub searches: Vec<String>,
        /// Options of the resolver.
        pub options: Vec<DnsOption>,
    }

    /// An option of the resolver.
    pub struct DnsOption {
        /// Its name.
        pub name: Option<String>,
        /// Its value.
        pub value: Option<String>,
    }
}

pub(super) fn validate(spec: &VmiSpec, path: &FieldPath, causes: &mut Causes) {
    let policy = spec
        .dns_policy
        .as_deref()
        .filter(|policy| !policy.is_empty());
    if let Some(policy) = policy {
        causes.one_of(
            &path.child("dnsPolicy"),
            policy,
            &["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"],
        );
    }
    let path = path.child("dnsConfig");
    let none = policy == Some("None");
    let Some(config) = &spec.dns_config else {
        if none {
            causes.required(&path, "is required with the DNS policy None");
        }
        return;
    };
    let servers = path.child("nameservers");
    if none && config.nameservers.is_empty() {
        causes.required(&servers, "needs a server with the DNS policy None");
    }
    if config.nameservers.len() > MAX_NAMESERVERS {
        causes.invalid(
            &servers,
            format_args!("must not have more than {MAX_NAMESERVERS}"),
        );
    }
    for (index, server) in config.nameservers.iter().take(MAX_NAMESERVERS).enumerate() {
        if server.parse::<IpAddr>().is_err() {
            let message = format!("is {}, but must be an IP address", shown(server));
            causes.invalid(&servers.index(index), message);
        }
    }
    let searches = path.child("searches");
    if config.searches.len() > MAX_SEARCHES {
        causes.invalid(
            &searches,
            format_args!("must not have more than {MAX_SEARCHES}"),
        );
    }
    let characters = config
        .searches
        .iter()
        .map(|search| search.len() + 1)
        .sum::<usize>();
    if characters > MAX_SEARCH_CHARACTERS + 1 {
        causes.invalid(
            &searches,
            format_args!("must not have more than {MAX_SEARCH_CHARACTERS} characters in all"),
        );
    }
    for (index, search) in config.searches.iter().take(MAX_SEARCHES).enumerate() {
        let domain = search.strip_suffix('.').unwrap_or(search);
        if !crate::names::is_dns_subdomain(domain) {
            let message = format!("is {}, but must be a DNS domain", shown(search));
            causes.invalid(&searches.index(index), message);
        }
    }
    for (index, option) in config.options.iter().enumerate() {
        if option.name.as_ref().is_none_or(String::is_empty) {
            causes.required(
                &path.child("options").index(index).child("name"),
                "is required",
            );
        }
    }
}
