//! What a specification is made of.

use oci_spec::image;
use podvisor_cri_messages::ContainerConfig;

use super::volume::Volume;
use crate::machine::UserRange;

/// The input of a specification.
#[derive(Debug)]
pub(in crate::cri) struct SpecRequest<'a> {
    /// The container's id.
    pub(in crate::cri) id: &'a str,
    /// The guest's host name.
    pub(in crate::cri) hostname: &'a str,
    /// The container.
    pub(in crate::cri) container: &'a ContainerConfig,
    /// Its image.
    pub(in crate::cri) image: Option<&'a image::Config>,
    /// Its volumes.
    pub(in crate::cri) volumes: &'a [Volume],
    /// The ids of the pod's users, if it has a user namespace.
    pub(in crate::cri) users: Option<UserRange>,
}
