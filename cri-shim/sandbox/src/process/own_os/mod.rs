//! A guest with an operating system of its own.
//!
//! The process begins without a machine, with all that it needs to build one in its jail. A request
//! boots a machine, whose life is that of a container: the serial console is its output and input,
//! and it ends with an exit code. A guest that reboots gets a new machine and stays in its
//! container; one that powers itself off ends the container alone, and another one may follow. The
//! process ends when it is asked to.
//!
//! | file | contents |
//! | --- | --- |
//! | `system` | the guest of the process: which container's machine runs, and the pod's end |
//! | `requests` | the requests about a container |
//! | `guest_agent`, `agent_of_machine` | what QEMU's guest agent is asked |
//! | `files` | files that are copied by its agent |
//! | `programs` | programs that run in the guest by its agent |
//! | `read_kernel` | a machine of the loader alone, which reads what an image boots |
//! | `dump`, `dumps` | a machine whose memory is dumped; what is known of dumps |
//! | `save` | a machine that is saved in files |
//! | `disks` | disks that grow, and their locks after the last machine |
//! | `plug` | disks that come and go while the guest runs |
//! | `size` | CPUs and memory that come while the guest runs |
//! | `links` | links of its cards that come and go |
//! | `dhcp` | the servers that tell the guest its addresses |
//! | `migrations`, `migration`, `arrival`, `connection` | machines that move to other hosts, and come from them |
//! | `vm` | one container's machine, and those that follow its reboots |
//! | `boots`, `boot_lines` | how machines are booted, and how far they got |
//! | `stop` | a machine that is asked to end or reboot, or is killed |
//! | `delays` | delays before a machine that resets itself again and again is built anew |
//! | `outcome` | how a machine's end is reported as its container's |
//! | `usage` | the resource usage of the process |
//! | `refusals` | refusals of several kinds of requests |

mod agent_of_machine;
mod arrival;
mod boot_lines;
mod boots;
mod connection;
mod delays;
mod dhcp;
mod disks;
mod dump;
mod dumps;
mod files;
mod guest_agent;
mod links;
mod migration;
mod migrations;
mod outcome;
mod plug;
mod programs;
mod read_kernel;
mod refusals;
mod requests;
mod save;
mod size;
mod stop;
mod system;
mod usage;
mod vm;

pub(super) use requests::answer;
pub(super) use system::{OwnOs, Resources};
pub(super) use usage::Usage;
