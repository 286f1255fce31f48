//! Disks that are plugged into the machine for containers, by their serial numbers.

use std::collections::{BTreeMap, BTreeSet};

use crate::machine::PluggedDisk;

/// The disks, and the containers that use them.
#[derive(Debug, Default)]
pub(super) struct Plugs(BTreeMap<String, Plug>);

#[derive(Debug)]
struct Plug {
    disk: PluggedDisk,
    users: BTreeSet<String>,
}

impl Plugs {
    /// Records that `container` uses the disk, if it is plugged in.
    pub(super) fn take(&mut self, serial: &str, container: &str) -> bool {
        let plug = self.0.get_mut(serial);
        plug.map(|plug| plug.users.insert(container.to_owned()))
            .is_some()
    }

    /// Records a disk that was plugged in for `container`.
    pub(super) fn add(&mut self, serial: String, disk: PluggedDisk, container: &str) {
        let users = [container.to_owned()].into();
        self.0.insert(serial, Plug { disk, users });
    }

    /// Records that `container` is gone; returns the disks that are no longer used, with their
    /// serial numbers. They must be unplugged and forgotten.
    pub(super) fn leave(&mut self, container: &str) -> Vec<(String, PluggedDisk)> {
        for plug in self.0.values_mut() {
            plug.users.remove(container);
        }
        let left = self.0.iter().filter(|(_, plug)| plug.users.is_empty());
        left.map(|(serial, plug)| (serial.clone(), plug.disk.clone()))
            .collect()
    }

    /// Forgets a disk that the guest has released.
    pub(super) fn forget(&mut self, serial: &str) {
        self.0.remove(serial);
    }
}
