//! A VM that continues from a snapshot, or that has moved here.

use std::error::Error;
use std::io::{Read, Write};

use kvm_ioctls::Kvm;
use podvisor_devices::legacy::events::Events;

use super::assemble::{assemble, check_address_space, memory_device};
use super::hardware::{Begin, Board, Hardware, Vcpus};
use super::saved_state;
use super::settings::{Parts, VmBuilder};
use crate::migration::{ArrivedMigration, ReceiveError, VmAhead};
use crate::snapshot::Snapshot;
use crate::vm::devices::attach::GivenDevice;
use crate::vm::devices::images::{self, Images};
use crate::vm::error::BuildError;
use crate::vm::lifecycle::Vm;
use crate::vm::threads::in_parallel;
use crate::{cpuid, kvm};

/// The snapshot from which a VM continues, in a [`RestoreBuilder`].
#[derive(Debug)]
pub struct Restore {
    pub(super) snapshot: Snapshot,
    /// What was made of it before it was known.
    ahead: Option<VmAhead>,
    requires_same_cpu: bool,
    is_same_machine: bool,
}

/// The configuration of a VM that continues from a snapshot, which has its vCPUs, memory, bus and
/// kernel. See [`Snapshot::builder`].
pub type RestoreBuilder = VmBuilder<Restore>;

impl Snapshot {
    /// Returns a builder for a VM that resumes where the snapshot was taken. Its devices are added
    /// in the order of [`Self::devices`], each with its own disk, tap or socket; vCPUs, memory and
    /// kernel come from the snapshot.
    pub fn builder(&self) -> RestoreBuilder {
        VmBuilder {
            source: Restore {
                snapshot: self.clone(),
                ahead: None,
                requires_same_cpu: false,
                is_same_machine: false,
            },
            parts: Parts::default(),
        }
    }
}

impl RestoreBuilder {
    /// Uses what was made of the VM before its state was known.
    fn made_ahead(mut self, ahead: Option<VmAhead>) -> Self {
        self.source.ahead = ahead;
        self
    }

    /// Refuses a snapshot whose guest does not know everything that this host's processor and KVM
    /// offer. It would never use what new microcode or a new kernel has added since then, most
    /// importantly mitigations.
    pub fn require_same_cpu(mut self) -> Self {
        self.source.requires_same_cpu = true;
        self
    }

    /// The VM is the one of the snapshot, which goes on, and of which there is no other one: its
    /// guest keeps its [generation ID](crate::VmBuilder::generation_id). By default it is a copy,
    /// which has the snapshot's past and a future of its own.
    pub fn same_machine(mut self) -> Self {
        self.source.is_same_machine = true;
        self
    }

    /// Validates the configuration, then creates the VM with the snapshot's state, ready to start.
    ///
    /// # Errors
    /// [`BuildError::Config`] lists everything that is wrong with the configuration; the others are
    /// failures of the host, or say why the snapshot cannot be restored here.
    pub fn build(mut self) -> Result<Vm, BuildError> {
        match self.parts.open_kvm() {
            Ok(kvm) => {
                self.validate(kvm::max_vcpus(&kvm))?;
                restore_on(kvm, self)
            }
            // Mistakes that can be found without KVM are reported first.
            Err(error) => {
                self.validate(u8::MAX)?;
                Err(error.into())
            }
        }
    }
}

impl<S: Read + Write> ArrivedMigration<S> {
    /// Returns a builder of the VM, which needs the devices that were announced. One VM can be
    /// built. [`Self::start`] starts it.
    pub fn builder(&self) -> RestoreBuilder {
        self.snapshot().builder().made_ahead(self.take_ahead())
    }

    /// Takes the VM from the other side, which ends it there, and starts `vm`, which was built here
    /// and has not been started; one that arrives paused is left as it is.
    ///
    /// # Errors
    /// See [`ReceiveError`]; `vm` has not been started then.
    pub fn start(self, vm: &Vm) -> Result<(), ReceiveError> {
        self.take(|| {
            vm.start()
                .map_err(|error| -> Box<dyn Error + Send + Sync> { error.into() })
        })
    }
}

fn restore_on(kvm: Kvm, builder: RestoreBuilder) -> Result<Vm, BuildError> {
    let VmBuilder { source, parts } = builder;
    let snapshot = &source.snapshot;
    let state = snapshot.state();
    let mut devices = parts.devices;
    if let Some(place) = snapshot.memory_device() {
        let own = memory_device(state.memory)?;
        let own = own.map(|device| GivenDevice { id: None, device });
        let place = place.min(devices.len());
        devices.splice(place..place, own);
    }
    let devices = saved_state::device_states(devices, &state.devices)?;
    let here = cpuid::guest_cpuid(&kvm, snapshot.max_vcpus(), None)?;
    snapshot.check_cpu(here.as_slice())?;
    let end = images::end(&devices, state.memory);
    check_address_space(end, &state.cpuid)?;
    check_address_space(end, &here)?;

    let mut memory = snapshot.map()?;
    memory.set_page_map(parts.page_map);
    let images = Images::map(&kvm, &devices, &mut memory)?;
    let vcpus = Vcpus {
        count: snapshot.vcpus(),
        max: snapshot.max_vcpus(),
        cpuid: Some(&state.cpuid),
    };
    let serial = parts.serial;
    let begin = match source.ahead {
        Some(ahead) => Begin::Ahead(ahead),
        None => Begin::New(parts.early),
    };
    let build = || {
        let board = Board {
            transport: state.transport(),
            has_firmware: state.firmware.is_some(),
        };
        let mut hardware = Hardware::new(&kvm, begin, &memory, board, devices, vcpus)?;
        if let (true, Some(vcpu)) = (source.requires_same_cpu, hardware.vcpus.first()) {
            snapshot.check_same_cpu(here.as_slice(), vcpu)?;
        }
        images.insert(&hardware.bus)?;
        saved_state::machine(&mut hardware, state)?;
        if let Some(saved) = &state.serial {
            let out = serial.unwrap_or_else(|| Box::new(std::io::sink()));
            hardware.add_serial(out, Some(saved))?;
        }
        if let Some(saved) = &state.firmware {
            hardware.add_firmware_devices(Some(saved))?;
        }
        if let Some(saved) = &state.events {
            hardware.add_events(Events::default(), Some(saved))?;
            if !snapshot.is_moved() && !source.is_same_machine {
                hardware.renew_generation_id(&memory)?;
            }
        }
        Ok::<_, BuildError>(hardware)
    };
    let hardware = match &state.working_set {
        // As at a boot: copying pages keeps a CPU busy.
        Some(set) => {
            let (_, hardware) = in_parallel("vm-load", || memory.make_own(set.pages()), build);
            hardware?
        }
        None => build()?,
    };
    let origin = snapshot.full().cloned();
    let memory = (memory, images);
    Ok(assemble(kvm, memory, hardware, parts.seccomp, origin))
}
