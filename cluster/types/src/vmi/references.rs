//! References to other objects of the VM's namespace.

use crate::{Causes, FieldPath, cause::shown, names::is_dns_subdomain};

object! {
    /// An object of the same namespace.
    pub struct LocalReference {
        /// Its name.
        pub name: String,
    }
}

/// Refuses what cannot be the name of an object.
pub(super) fn validate_name(name: &str, path: &FieldPath, causes: &mut Causes) {
    if name.is_empty() {
        causes.required(path, "is required");
    } else if !is_dns_subdomain(name) {
        let message = format!("is {}, not the name of an object", shown(name));
        causes.invalid(path, message);
    }
}
