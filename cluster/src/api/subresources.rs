//! The table of all subresources: discovery, OpenAPI and the rights of users are made of it.

/// One subresource of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Subresource {
    /// Plural name of the object's kind.
    pub(crate) resource: &'static str,
    /// Its name, with all steps that it may have.
    pub(crate) name: &'static str,
    /// `get` or `update`.
    pub(crate) verb: &'static str,
    /// Who may use it.
    pub(crate) right: Right,
}

/// Which role of Kubernetes includes the right to a subresource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Right {
    /// Whoever may read the object.
    View,
    /// Whoever may change it.
    Edit,
}

pub(super) const VM: &str = "virtualmachines";
pub(super) const VMI: &str = "virtualmachineinstances";

const fn of(
    resource: &'static str,
    verb: &'static str,
    right: Right,
    name: &'static str,
) -> Subresource {
    Subresource {
        resource,
        name,
        verb,
        right,
    }
}

const fn vm(name: &'static str) -> Subresource {
    of(VM, "update", Right::Edit, name)
}

const fn vmi(name: &'static str) -> Subresource {
    of(VMI, "update", Right::Edit, name)
}

const fn stream(name: &'static str) -> Subresource {
    of(VMI, "get", Right::Edit, name)
}

const fn fact(name: &'static str) -> Subresource {
    of(VMI, "get", Right::View, name)
}

/// All of them, by kind and name.
pub(crate) const SUBRESOURCES: [Subresource; 35] = [
    vm("addvolume"),
    of(VM, "get", Right::View, "expand-spec"),
    vm("memorydump"),
    vm("migrate"),
    of(VM, "get", Right::View, "objectgraph"),
    of(VM, "get", Right::Edit, "portforward"),
    vm("removememorydump"),
    vm("removevolume"),
    vm("restart"),
    vm("start"),
    vm("stop"),
    vmi("addvolume"),
    stream("console"),
    fact("filesystemlist"),
    vmi("freeze"),
    fact("guestosinfo"),
    fact("objectgraph"),
    vmi("pause"),
    stream("portforward"),
    vmi("removevolume"),
    vmi("reset"),
    stream("sev/fetchcertchain"),
    stream("sev/querylaunchmeasurement"),
    vmi("sev/injectlaunchsecret"),
    vmi("sev/setupsession"),
    vmi("softreboot"),
    vmi("unfreeze"),
    vmi("unpause"),
    stream("usbredir"),
    fact("userlist"),
    stream("vnc"),
    stream("vnc/screenshot"),
    stream("vsock"),
    vmi("evacuate/cancel"),
    vm("evacuate/cancel"),
];

/// The part of a subresource that rights are given for: its first step.
pub(crate) fn first_step(name: &str) -> &str {
    name.split_once('/').map_or(name, |(first, _)| first)
}
