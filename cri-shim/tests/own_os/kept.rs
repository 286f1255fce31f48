//! Kernels that are read from an image once, and started in place of the loader.

use podvisor_cri::sandbox::BootWay;

use super::*;

#[tokio::test]
async fn a_kept_kernel_is_started_once_and_reboots_go_through_the_loader() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    let kept = |kernel| KeptKernel {
        kernel,
        initramfs: None,
        cmdline: "ro".to_owned(),
        title: "Debian\u{1b}".to_owned(),
    };
    let boot = BootMachine {
        kept: Some(kept(kernel_that_says(&pod, "kept\n"))),
        // Nobody writes a line of the loader.
        loader_limit: Some(Duration::from_millis(1)),
        ..machine(&pod, "vm")
    };
    sandbox.boot_machine(boot).await.unwrap();
    eventually("the kept kernel", || pod.log("vm").contains("F kept\n")).await;
    assert!(!pod.log("vm").contains("ready"), "{}", pod.log("vm"));
    let said = r#"podvisor: entry "Debian\u{1b}": starting the kernel that was kept of the image"#;
    assert!(pod.log("vm").contains(said), "{}", pod.log("vm"));
    let report = sandbox.boot_report("vm").await.unwrap();
    assert_eq!(report.way, BootWay::KeptKernel);
    let said = (report.entry.as_deref(), report.cmdline.as_deref());
    assert_eq!(said, (Some("Debian"), Some("ro")));
    attach(&sandbox, "vm").await.write_all(b"p").unwrap();
    assert_eq!(sandbox.wait("vm", None).await.unwrap().code, 0);

    let boot = BootMachine {
        kept: Some(kept(kernel_that_says(&pod, "kept\n"))),
        ..machine(&pod, "resets")
    };
    sandbox.boot_machine(boot).await.unwrap();
    let mut typing = attach(&sandbox, "resets").await;
    eventually("the kept kernel", || pod.log("resets").contains("F kept\n")).await;
    typing.write_all(b"r").unwrap();
    says(&pod, "resets", 1).await;
    assert_eq!(pod.log("resets").matches("kept\n").count(), 1);
    let report = sandbox.boot_report("resets").await.unwrap();
    assert_eq!((report.way, report.boots), (BootWay::OwnKernel, 2));
    typing.write_all(b"p").unwrap();
    assert_eq!(sandbox.wait("resets", None).await.unwrap().code, 0);

    // What is no kernel after all.
    let boot = BootMachine {
        kept: Some(kept(File::open("/etc/passwd").unwrap())),
        ..machine(&pod, "damaged")
    };
    sandbox.boot_machine(boot).await.unwrap();
    says(&pod, "damaged", 1).await;
    assert!(
        !pod.log("damaged").contains("kept"),
        "{}",
        pod.log("damaged")
    );
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_loader_that_reads_no_kernel_is_an_error_with_its_reason() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    let read = |kernel| ReadKernel {
        kernel,
        initramfs: kernel_that_says(&pod, "no loader"),
        cmdline: String::new(),
        memory: 64 << 20,
        image: file_of(&pod, "image", 4096),
        frame: file_of(&pod, "frame", 4096),
    };
    // Each powers itself off once it has said something.
    let off = |said| kernel_that_ends(&pod, said);
    let why = "podvisor-loader: error: no disk\n";
    let error = sandbox.read_kernel(read(off(why))).await.unwrap_err();
    assert!(error.to_string().ends_with("kernel: no disk"), "{error}");
    assert_eq!(error.kind(), Some(RefusalKind::Image), "{error}");
    sandbox
        .read_kernel(read(off("podvisor-loader: disk\n")))
        .await
        .unwrap();
    let mut large = read(off(""));
    large.memory = 1 << 40;
    let error = sandbox.read_kernel(large).await.unwrap_err();
    assert_eq!(error.kind(), Some(RefusalKind::InvalidArgument), "{error}");
    // The sandbox has its machine as ever, and then no other.
    sandbox.boot_machine(machine(&pod, "vm")).await.unwrap();
    says(&pod, "vm", 1).await;
    let error = sandbox.read_kernel(read(off(""))).await.unwrap_err();
    assert_eq!(error.kind(), Some(RefusalKind::WrongState), "{error}");
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}

fn file_of(pod: &Pod, name: &str, bytes: u64) -> File {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(true);
    let file = options.open(pod.path(name)).unwrap();
    file.set_len(bytes).unwrap();
    file
}
