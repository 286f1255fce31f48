//! The little of an object's metadata that this crate reads.

use std::collections::BTreeMap;

object! {
    /// What of an object's metadata defaults and validation look at.
    pub struct Meta {
        /// Name within the namespace.
        pub name: String,
        /// Prefix of the name where the API server makes the rest.
        pub generate_name: String,
        /// Namespace.
        pub namespace: String,
        /// Unique over space and time.
        pub uid: String,
        /// Labels.
        pub labels: BTreeMap<String, String>,
        /// Annotations.
        pub annotations: BTreeMap<String, String>,
        /// What must be cleaned up before the object may go.
        pub finalizers: Vec<String>,
        /// When deletion was asked for.
        pub deletion_timestamp: Option<String>,
    }
}
