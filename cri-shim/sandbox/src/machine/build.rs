//! Machines of podvisor's own guest: their command line and devices.

use std::sync::Arc;
use std::thread;

use podvisor_vmm::{
    BlockDevice, BlockHandle, EarlyVm, MemorySize, Transport, Vm, VmBuilder, VmExit, VsockDevice,
};
use tokio::sync::watch;
use tracing::debug;

use super::config::{Boot, MachineConfig, VsockPort};
use super::console::Console;
use super::disk::Disk;
use super::error::{MachineError, causes};
use super::exit::MachineExit;
use super::nic::Nic;
use super::panic::KernelPanic;
use super::running::{Machine, Ports};
use super::share::SharedDir;

/// The guest's vsock address, the lowest that a guest may have; guests of different
/// machines do not see each other.
pub(super) const GUEST_CID: u64 = 3;

/// The kernel command line of every guest: reset instead of hanging after a kernel panic.
const COMMAND_LINE: &str = concat!(
    "panic=-1 reboot=k",
    // Mounting and unmounting, which containers do a lot, does not wait for normal RCU grace
    // periods.
    " rcupdate.rcu_expedited=1",
    // The TSC is not checked twice a second on hosts where it is not invariant: there kvm-clock is
    // the clock anyway.
    " tsc=nowatchdog",
    // No dummy interface by default.
    " dummy.numdummies=0",
);

/// Added for guests without a console: be quiet, and do not probe for serial ports, which do not
/// exist.
const UNWATCHED: &str = " quiet 8250.nr_uarts=0";

/// Added for guests with a serial console. Nothing else differs, so that what is seen there is
/// what happens without it.
const WATCHED: &str = " console=ttyS0";

/// The size of the conntrack hash table, for 131072 connections: otherwise the kernel derives it
/// from the memory at boot. It takes 128 KiB, which clones share until they use it.
const CONNECTIONS: &str = " nf_conntrack.hashsize=16384";

/// Added for guests without a PCI bus.
const NO_PCI: &str = " pci=off";

/// Added for guests that start with one CPU. Atomic instructions are not patched for a single CPU,
/// which costs more at boot than a pod ever gains by it. Memory of each CPU is allocated by pages:
/// by huge pages, one CPU's area is 2 MiB, and the array that records which memory cgroup is
/// charged for each part of it takes 4 MiB.
const ONE_CPU: &str = " noreplace-smp percpu_alloc=page";

/// Added for guests that count pressure stall information.
const PSI: &str = " psi=1";

/// Stack of the thread that waits for a machine's end. The usual 2 MiB can become a huge page,
/// which the machine would then have for as long as it lives.
const STACK: usize = 256 << 10;

/// A machine that is built and has not run yet: everything that needs a path or a privilege is
/// done, and no thread has been started.
#[derive(Debug)]
pub struct BuiltMachine {
    pub(super) vm: Arc<Vm>,
    pub(super) spare: Vec<BlockHandle>,
    pub(super) ports: Ports,
    pub(super) console: Option<Arc<Console>>,
}

/// What a machine has, however it starts.
struct Parts<'a> {
    early: Option<EarlyVm>,
    disks: Vec<Disk>,
    spare_disks: u8,
    nics: Vec<Nic>,
    share: Option<SharedDir>,
    host_ports: Vec<VsockPort>,
    console: Option<&'a Arc<Console>>,
}

impl Parts<'_> {
    fn add_to<S>(self, mut builder: VmBuilder<S>) -> Result<VmBuilder<S>, MachineError> {
        if let Some(vm) = self.early {
            builder = builder.early(vm);
        }
        for Disk { file, serial } in self.disks {
            let disk = BlockDevice::from_file(file)?.read_only();
            builder = builder.block(disk.serial(&serial));
        }
        for _ in 0..self.spare_disks {
            builder = builder.block(BlockDevice::spare());
        }
        for nic in self.nics {
            builder = builder.net(nic.device()?);
        }
        if let Some(share) = self.share {
            builder = builder.fs(share.device()?);
        }
        let mut vsock = VsockDevice::in_process(GUEST_CID)?;
        for VsockPort { port, on_connect } in self.host_ports {
            vsock.listen(port, on_connect);
        }
        if let Some(console) = self.console {
            builder = builder.serial(console.writer());
        }
        // The guest's free memory is returned to the host automatically.
        Ok(builder.vsock(vsock).rng().balloon())
    }
}

/// Returns the kernel command line of a guest that boots.
fn command_line(cpus: u8, transport: Transport, psi: bool, is_watched: bool) -> String {
    let for_console = if is_watched { WATCHED } else { UNWATCHED };
    let for_bus = match transport {
        Transport::Mmio => NO_PCI,
        Transport::Pci => "",
    };
    let for_cpus = if cpus == 1 { ONE_CPU } else { "" };
    let for_figures = if psi { PSI } else { "" };
    format!("{COMMAND_LINE}{for_console}{CONNECTIONS}{for_bus}{for_cpus}{for_figures}")
}

impl BuiltMachine {
    /// Builds a machine whose guest can connect to `host_ports` of the host over vsock.
    ///
    /// # Errors
    /// [`MachineError`]; nothing is left of the machine then.
    pub fn new(config: MachineConfig, host_ports: Vec<VsockPort>) -> Result<Self, MachineError> {
        let MachineConfig {
            boot,
            cpus,
            max_cpus,
            memory,
            growth,
            disks,
            spare_disks,
            nics,
            share,
            transport,
            psi,
            console,
            early,
        } = config;
        let console = console.map(Console::new).transpose();
        let console = console.map_err(MachineError::ConsoleFile)?;
        let first_spare = disks.len();
        let parts = Parts {
            early,
            disks,
            spare_disks,
            nics,
            share,
            host_ports,
            console: console.as_ref(),
        };
        let vm = match boot {
            Boot::Warm(snapshot) => parts.add_to(snapshot.builder())?.build()?,
            Boot::Template(snapshot) => {
                let builder = snapshot.builder().require_same_cpu();
                parts.add_to(builder)?.build()?
            }
            Boot::Cold(files) => {
                let is_watched = console.is_some();
                let builder = Vm::builder()
                    .kernel(files.kernel)
                    .initramfs(files.initramfs)
                    .vcpus(cpus)
                    .max_vcpus(max_cpus)
                    .transport(transport)
                    .memory(MemorySize::bytes(memory))
                    .cmdline(command_line(cpus, transport, psi, is_watched));
                let builder = match growth {
                    0 => builder,
                    most => builder.hotplug_memory(MemorySize::bytes(most)),
                };
                parts.add_to(builder)?.build()?
            }
        };
        let vm = Arc::new(vm);
        if let Some(console) = &console {
            let console = Arc::clone(console);
            vm.on_serial_drained(move || console.drained());
        }
        let spare = (first_spare..first_spare + usize::from(spare_disks))
            .map(|number| vm.block(&format!("blk{number}")))
            .collect::<Result<_, _>>()?;
        let ports = Ports(vm.vsock()?);
        Ok(Self {
            vm,
            spare,
            ports,
            console,
        })
    }

    /// Whether [`Machine::add_cpus`](super::Machine::add_cpus) may add vCPUs.
    #[must_use]
    pub fn may_grow_cpus(&self) -> bool {
        self.vm.max_vcpus() > self.vm.vcpus()
    }

    /// Starts the guest.
    ///
    /// # Errors
    /// [`MachineError`]; nothing is left of the machine then.
    pub fn start(self) -> Result<Machine, MachineError> {
        self.vm.start()?;
        self.watch()
    }

    /// Waits from now on for the end of a machine, which has been started or is paused.
    pub(super) fn watch(self) -> Result<Machine, MachineError> {
        let Self {
            vm,
            spare,
            ports,
            console,
        } = self;
        let (stops, stopped) = watch::channel(false);
        let (sender, exit) = watch::channel(None);
        let (waited, output) = (Arc::clone(&vm), console.clone());
        let wait = move || {
            waited.wait_until_stopped();
            // There is no receiver if the machine has been dropped.
            let _ = stops.send(true);
            let exit = match waited.wait() {
                Ok(VmExit::Reset) => {
                    let panic = KernelPanic::find(|at, bytes| waited.read_memory(at, bytes));
                    panic.map_or(MachineExit::Reset, MachineExit::Panicked)
                }
                Ok(exit) => MachineExit::from(exit),
                Err(error) => MachineExit::Failed(causes(&error)),
            };
            debug!(%exit, "the machine has ended");
            if let Some(console) = output {
                console.close();
            }
            // There is no receiver if the machine has been dropped.
            let _ = sender.send(Some(exit));
        };
        thread::Builder::new()
            .name("vm-wait".to_owned())
            .stack_size(STACK)
            .spawn(wait)
            .map_err(MachineError::Thread)?;
        Ok(Machine {
            vm,
            spare,
            ports,
            console,
            stopped,
            exit,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_console_changes_nothing_but_where_the_guests_kernel_writes() {
        for (cpus, transport) in [(1, Transport::Mmio), (4, Transport::Pci)] {
            let line = |is_watched| command_line(cpus, transport, true, is_watched);
            let (watched, unwatched) = (line(true), line(false));
            assert_eq!(
                watched.replace(WATCHED, ""),
                unwatched.replace(UNWATCHED, "")
            );
            assert!(watched.contains(COMMAND_LINE) && watched.contains("console=ttyS0"));
        }
    }
}
