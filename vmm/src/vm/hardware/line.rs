//! Interrupt lines of the I/O APIC and the 8259s that KVM emulates.

use std::sync::{Arc, Mutex};

use kvm_ioctls::VmFd;
use podvisor_devices::virtio::InterruptLine;

use crate::vm::lock::lock;

/// A line, raised by ioctl from the thread that has the interrupt.
///
/// An irqfd would raise it from a kernel thread, since only MSIs are delivered directly where an
/// eventfd is written: one more thread switch for each interrupt. And at the VM's end KVM waits for
/// a grace period, about 4 ms, for each single irqfd.
#[derive(Debug)]
pub(crate) struct Line {
    vm: Arc<VmFd>,
    gsi: u32,
    /// Queues with their own threads share their device's line. While it is high, raising it again
    /// is not an edge, and not an interrupt.
    edge: Mutex<()>,
}

impl Line {
    pub(crate) fn new(vm: &Arc<VmFd>, gsi: u32) -> Self {
        Self {
            vm: vm.clone(),
            gsi,
            edge: Mutex::new(()),
        }
    }
}

impl Line {
    /// Sets a level-triggered line.
    pub(crate) fn set_level(&self, is_high: bool) {
        let _edge = lock(&self.edge);
        // It fails only for lines that no interrupt controller has.
        let _ = self.vm.set_irq_line(self.gsi, is_high);
    }
}

impl InterruptLine for Line {
    fn raise(&self) {
        let _edge = lock(&self.edge);
        for level in [true, false] {
            // It fails only for lines that no interrupt controller has.
            let _ = self.vm.set_irq_line(self.gsi, level);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

    use kvm_bindings::{KVM_IRQCHIP_IOAPIC, kvm_irqchip};
    use kvm_ioctls::VcpuFd;

    use super::*;
    use crate::kvm;

    const GSI: u32 = 5;
    /// The vector of the line's interrupt, at the first vCPU's APIC.
    const VECTOR: usize = 0x50;
    /// Its position in the APIC's request register: byte and bit.
    const REQUEST: (usize, i8) = (
        0x200 + 0x10 * (VECTOR / 32) + VECTOR % 32 / 8,
        1 << (VECTOR % 8),
    );

    /// A line with edge-triggered interrupts, of a vCPU that does not run.
    fn line() -> (Line, VcpuFd) {
        let vm = Arc::new(kvm::create_vm(&kvm::open().unwrap()).unwrap());
        kvm::create_chips(&vm).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let mut lapic = vcpu.get_lapic().unwrap();
        // Spurious interrupts: on.
        lapic.regs[0xf1] = 1;
        vcpu.set_lapic(&lapic).unwrap();
        let mut chip = kvm_irqchip {
            chip_id: KVM_IRQCHIP_IOAPIC,
            ..Default::default()
        };
        vm.get_irqchip(&mut chip).unwrap();
        // SAFETY: this chip's state is the union's member of that name; integers are valid for any
        // bit pattern.
        #[allow(unsafe_code)]
        unsafe {
            chip.chip.ioapic.redirtbl[GSI as usize].bits = VECTOR as u64;
        }
        vm.set_irqchip(&chip).unwrap();
        (Line::new(&vm, GSI), vcpu)
    }

    /// Returns whether the interrupt was requested since the last call.
    fn take_request(vcpu: &VcpuFd) -> bool {
        let (byte, bit) = REQUEST;
        let mut lapic = vcpu.get_lapic().unwrap();
        let was_there = lapic.regs[byte] & bit != 0;
        lapic.regs[byte] &= !bit;
        vcpu.set_lapic(&lapic).unwrap();
        was_there
    }

    #[test]
    fn a_raise_is_an_interrupt_though_another_thread_raises_the_same_line() {
        let (line, vcpu) = line();
        assert!(!take_request(&vcpu));
        line.raise();
        assert!(take_request(&vcpu));
        let done = AtomicBool::new(false);
        let (mut raised, mut lost) = (0, 0);
        thread::scope(|scope| {
            scope.spawn(|| {
                for pause in (0..200).cycle() {
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                    line.raise();
                    (0..pause).for_each(|_| std::hint::spin_loop());
                }
            });
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_millis(500) {
                take_request(&vcpu);
                line.raise();
                lost += u32::from(!take_request(&vcpu));
                raised += 1;
            }
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!(lost, 0, "of {raised}");
    }
}
