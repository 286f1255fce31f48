//! The lifecycle of a VM: how it ends, and what start, pause, resume and stop do.

mod support;

use std::sync::Arc;
use std::time::Duration;

use podvisor_vmm::{Action, MemorySize, PoisonCause, State, Vm, VmError, VmExit};
use support::{Console, in_time, linux, pause, tiny_kernel};

/// 32-bit code that writes `value` to `port`, then loops.
fn out_byte(port: u16, value: u8) -> Vec<u8> {
    let [low, high] = port.to_le_bytes();
    // mov dx, port; mov al, value; out dx, al; jmp $
    vec![0x66, 0xba, low, high, 0xb0, value, 0xee, 0xeb, 0xfe]
}

fn tiny(code: &[u8]) -> Vm {
    Vm::builder()
        .kernel(tiny_kernel(code))
        .memory(MemorySize::mib(32))
        .build()
        .unwrap()
}

fn run(code: &[u8]) -> Result<VmExit, VmError> {
    let vm = Arc::new(tiny(code));
    vm.start().unwrap();
    let waiter = vm.clone();
    in_time("wait", move || waiter.wait())
}

#[test]
fn guest_reset_shutdown_and_triple_fault_are_told_apart() {
    assert_eq!(run(&out_byte(0x64, 0xfe)).unwrap(), VmExit::Reset);
    assert_eq!(run(&out_byte(0x600, 0x34)).unwrap(), VmExit::Shutdown);
    // int3, without an interrupt table
    let exit = run(&[0xcc]).unwrap();
    assert!(
        matches!(exit, VmExit::TripleFault { vcpu: 0, .. }),
        "{exit}"
    );
}

#[test]
fn guest_that_kvm_cannot_run_poisons_its_vm_and_the_error_has_the_registers() {
    // jmp eax into the hole for devices: no instruction can be fetched there.
    let error = run(&[0xb8, 0, 0, 0, 0xd0, 0xff, 0xe0]).unwrap_err();
    let VmError::Poisoned(poison) = error else {
        panic!("{error}")
    };
    assert!(
        matches!(poison.cause, PoisonCause::InternalError { .. }),
        "{poison}"
    );
    assert_eq!(poison.registers.as_ref().unwrap().rip, 0xd000_0000);
    assert!(poison.to_string().contains("rip=0xd0000000"), "{poison}");
}

#[test]
fn guest_that_spins_is_paused_resumed_and_stopped() {
    // inc eax; out 0x80, al; jmp back
    let vm = Arc::new(tiny(&[0x40, 0xe6, 0x80, 0xeb, 0xfb]));
    assert_eq!(vm.state(), State::Created);
    assert!(matches!(
        vm.pause(),
        Err(VmError::IllegalState {
            action: Action::Pause,
            state: State::Created
        })
    ));
    vm.start().unwrap();
    assert!(vm.start().is_err());
    let exits = |vm: &Vm| vm.counters()[0].counters[1].value;
    for _ in 0..20 {
        let paused = vm.clone();
        in_time("pause", move || pause(&paused));
        assert_eq!(vm.state(), State::Paused);
        let before = exits(&vm);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(exits(&vm), before, "a paused guest runs");
        let resumed = vm.clone();
        in_time("resume", move || resumed.resume()).unwrap();
        let running = vm.clone();
        in_time("running on", move || {
            while running.counters()[0].counters[1].value == before {
                std::thread::yield_now();
            }
        });
    }
    let stopped = vm.clone();
    in_time("stop", move || stopped.stop()).unwrap();
    assert_eq!(
        (vm.state(), vm.wait().unwrap()),
        (State::Stopped, VmExit::Stopped)
    );
    assert!(vm.resume().is_err());
    vm.stop().unwrap();
}

#[test]
fn guest_that_is_paused_can_be_stopped_and_dropped() {
    let vm = tiny(&[0xeb, 0xfe]);
    vm.start().unwrap();
    pause(&vm);
    in_time("drop", move || drop(vm));
    // Never started.
    drop(tiny(&[0xeb, 0xfe]));
    let vm = tiny(&[0xeb, 0xfe]);
    vm.stop().unwrap();
    assert_eq!(vm.wait().unwrap(), VmExit::Stopped);
    assert!(vm.start().is_err());
}

#[test]
fn guest_vms_come_and_go_a_hundred_times_and_leave_no_descriptor_or_thread() {
    let count = |dir: &str| std::fs::read_dir(dir).unwrap().count();
    run(&out_byte(0x64, 0xfe)).unwrap();
    // The harness runs other tests at the same time: the minimum of several samples counts.
    let least = |dir: &'static str| (0..20).map(|_| count(dir)).min().unwrap();
    let before = least("/proc/self/fd");
    for _ in 0..100 {
        let vm = tiny(&out_byte(0x64, 0xfe));
        vm.start().unwrap();
        assert_eq!(vm.wait().unwrap(), VmExit::Reset);
    }
    let after = least("/proc/self/fd");
    assert!(
        after < before + 100,
        "{before} descriptors before, {after} after"
    );
}

/// Runs `PODVISOR_TEST_BOOTS` times; default: once.
#[test]
fn guest_linux_says_hello_and_sees_its_cpus_and_memory() {
    let boots = std::env::var("PODVISOR_TEST_BOOTS").map_or(1, |n| n.parse().unwrap());
    for boot in 1..=boots {
        says_hello();
        if boot % 50 == 0 {
            println!("{boot} boots");
        }
    }
}

fn says_hello() {
    let console = Console::default();
    let script = "echo cpus=$(nproc) mem=$(awk '/MemTotal/{print $2}' /proc/meminfo)\n\
                  grep -c x2apic /proc/cpuinfo; grep -c tsc_deadline_timer /proc/cpuinfo\n\
                  cat /sys/devices/system/clocksource/clocksource0/current_clocksource";
    let vm = linux(script, &console)
        .vcpus(2)
        .memory(MemorySize::mib(256))
        .build()
        .unwrap();
    vm.start().unwrap();
    assert_eq!(vm.wait().unwrap(), VmExit::Reset, "{}", console.text());
    let text = console.text();
    let mut lines = text.lines().skip_while(|line| !line.starts_with("cpus="));
    let first = lines.next().unwrap_or_else(|| panic!("{text}"));
    let mem: u64 = first
        .strip_prefix("cpus=2 mem=")
        .expect(&text)
        .parse()
        .unwrap();
    assert!((200 << 10..=256 << 10).contains(&mem), "{text}");
    assert_eq!(lines.next(), Some("2"), "{text}");
    assert_eq!(lines.next(), Some("2"), "{text}");
    assert!(
        ["kvm-clock", "tsc"].contains(&lines.next().unwrap()),
        "{text}"
    );
}

#[test]
fn guest_linux_goes_on_after_a_pause() {
    let console = Console::default();
    let vm = linux(
        "echo one; read line < /proc/uptime; sleep 1; echo two",
        &console,
    )
    .build()
    .unwrap();
    vm.start().unwrap();
    console.wait_for("one");
    pause(&vm);
    vm.resume().unwrap();
    assert_eq!(vm.wait().unwrap(), VmExit::Reset);
    assert!(console.text().contains("two"));
}

#[test]
fn guest_linux_panics_and_the_vm_ends() {
    let console = Console::default();
    let vm = linux("exit 3", &console).build().unwrap();
    vm.start().unwrap();
    assert_eq!(vm.wait().unwrap(), VmExit::Reset);
    assert!(
        console.text().contains("Attempted to kill init"),
        "{}",
        console.text()
    );
}
