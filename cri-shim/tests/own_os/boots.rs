//! How machines are booted is told, whatever started them.

use podvisor_cri::sandbox::{BootPhase as Phase, BootReport, BootWay};

use super::*;

fn phases(report: &BootReport) -> Vec<Phase> {
    report.times().map(|(phase, _)| phase).collect()
}

#[tokio::test]
async fn how_a_machine_was_booted_is_told_and_anew_when_it_reboots() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    let lines = "podvisor-loader: disk vda (serial \"root\")\n\
                 podvisor-loader: entry \"Debian\" (grub.cfg in /grub.cfg on vda1)\n\
                 podvisor-loader: kernel /vmlinuz on vda1, initial file system none\n\
                 podvisor-loader: command line: ro quiet\n\
                 podvisor-loader: starting the kernel at 0.2 s\n\
                 ready\n/ # ";
    let boot = BootMachine {
        kernel: kernel_that_says(&pod, lines),
        loader_limit: Some(BootMachine::LOADER_LIMIT),
        ..machine(&pod, "vm")
    };
    sandbox.boot_machine(boot).await.unwrap();
    let mut report = sandbox.boot_report("vm").await.unwrap();
    while !report.has(Phase::Prompt) {
        let next = sandbox.boot_report_after("vm", report.version).await;
        report = next.unwrap();
    }
    assert_eq!((report.way, report.boots), (BootWay::Loader, 1));
    let known = [
        &report.entry,
        &report.config,
        &report.kernel,
        &report.cmdline,
    ];
    let known = known.map(|text| text.as_deref().unwrap_or_default());
    let expected = [
        "Debian",
        "grub.cfg in /grub.cfg on vda1",
        "/vmlinuz on vda1",
        "ro quiet",
    ];
    assert_eq!(known, expected);
    let mut reached = phases(&report);
    // Whether the guest's first line or the machine's start is noted first is the host's matter.
    reached.retain(|phase| *phase != Phase::Machine);
    assert_eq!(
        reached,
        [
            Phase::Begun,
            Phase::Loader,
            Phase::Entry,
            Phase::Handed,
            Phase::Console,
            Phase::Prompt
        ]
    );

    attach(&sandbox, "vm").await.write_all(b"r").unwrap();
    while report.boots < 2 || !report.has(Phase::Prompt) {
        let next = sandbox.boot_report_after("vm", report.version).await;
        report = next.unwrap();
    }
    assert_eq!((report.way, report.boots), (BootWay::Loader, 2));
    let waits = sandbox.boot_report_after("vm", report.version);
    attach(&sandbox, "vm").await.write_all(b"p").unwrap();
    let ended = waits.await.unwrap_err();
    assert_eq!(ended.kind(), Some(RefusalKind::WrongState), "{ended}");
    // What was known is told as long as the container is there.
    assert_eq!(sandbox.boot_report("vm").await.unwrap(), report);
    let unknown = sandbox.boot_report("other").await.unwrap_err();
    assert_eq!(unknown.kind(), Some(RefusalKind::NotFound));
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}
