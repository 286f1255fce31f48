//! Which API is served to clients.

/// The group of the subresources.
pub const GROUP: &str = "subresources.kubevirt.io";

/// Its versions, which differ in nothing.
pub const VERSIONS: [&str; 2] = ["v1", "v1alpha3"];

/// The version of KubeVirt whose API is served, and that of the components as its build.
///
/// Clients compare the first part with their own: `virtctl` warns of any other minor version.
pub(crate) const VERSION: &str = concat!("v1.7.0+podvisor.", env!("CARGO_PKG_VERSION"));
