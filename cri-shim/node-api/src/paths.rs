//! The names of the service and of its calls.

/// The service.
pub(crate) const SERVICE: &str = "podvisor.node.v1.Node";

macro_rules! paths {
    ($($name:ident = $method:literal;)*) => {
        $(pub(crate) const $name: &str = concat!("/podvisor.node.v1.Node/", $method);)*

        #[cfg(test)]
        const ALL: &[&str] = &[$($name),*];
    };
}

paths! {
    LIST_VMS = "ListVms";
    WATCH_VMS = "WatchVms";
    VM_USAGE = "VmUsage";
    PAUSE = "Pause";
    UNPAUSE = "Unpause";
    SOFT_REBOOT = "SoftReboot";
    RESET = "Reset";
    STOP = "Stop";
    CONSOLE = "Console";
    PORT_FORWARD = "PortForward";
    BOOT_INFO = "BootInfo";
    GUEST_INFO = "GuestInfo";
    FREEZE = "Freeze";
    THAW = "Thaw";
    AGENT_EXEC = "AgentExec";
    VSOCK = "Vsock";
    SEND_MIGRATION = "SendMigration";
    RECEIVE_MIGRATION = "ReceiveMigration";
    CANCEL_MIGRATION = "CancelMigration";
    RESOLVE_MIGRATION = "ResolveMigration";
    PLUG_DISK = "PlugDisk";
    UNPLUG_DISK = "UnplugDisk";
    RESIZE_VM = "ResizeVm";
    DUMP_MEMORY = "DumpMemory";
    SET_LINKS = "SetLinks";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_has_a_path_of_its_own_below_the_service() {
        let mut seen = std::collections::BTreeSet::new();
        for path in ALL {
            let method = path.strip_prefix(&format!("/{SERVICE}/"));
            assert!(method.is_some_and(|method| !method.is_empty()), "{path}");
            assert!(seen.insert(path), "{path}");
        }
    }
}
