//! Pods whose one container is a virtual machine with an operating system of its own.
//!
//! Such a pod has the runtime handler `podvisor-vm` or Virtlet's annotation. Its sandbox is a
//! process without a machine; CreateContainer makes the disks, and StartContainer boots them. The
//! container is the machine from then on: its log is the serial console, its exit the machine's.
//! What its annotations ask for is read by `vm_spec`. docs/vm-pods.md describes all of it for
//! users.
//!
//! | file | contents |
//! | --- | --- |
//! | `pod` | which pods these are, and what is checked before there is a container |
//! | `name` | the names of their machines |
//! | `vmi` | the disks and directories of a VirtualMachineInstance |
//! | `honour` | fields of a pod and its container that a virtual machine cannot honour |
//! | `images` | disk images by name and URL, for the ImageService |
//! | `seed` | what cloud-init in the guest is told |
//! | `disks` | the files of a machine's disks |
//! | `dump_files` | dumps of a machine's memory in a claim |
//! | `attachment` | pods that keep a claim for a machine, and have none |
//! | `migration` | pods whose machine comes from another node |
//! | `network` | how a machine's first card is connected |
//! | `create`, `start` | CreateContainer and StartContainer |
//! | `ports` | connections to the guest's ports |
//!
//! Nothing here knows the VMM: machines are the sandbox's.

mod attachment;
mod create;
mod disks;
mod dump_files;
mod honour;
pub(super) mod images;
mod migration;
mod name;
mod network;
mod persistent;
mod pod;
mod ports;
mod seed;
mod shares;
mod start;
mod vmi;

pub(super) use attachment::{Attachment, is_attachment};
pub(super) use dump_files::DumpDirectory;
pub(super) use name::name_of;
pub(super) use network::card_form;
pub(super) use pod::{interfaces_of, is_vm, may_share, set_cards, size};
pub(super) use ports::{Way, connect};
