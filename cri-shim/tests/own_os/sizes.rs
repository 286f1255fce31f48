//! CPUs and memory that come while a guest runs. This one looks at neither.

use std::time::Duration;

use podvisor_cri::sandbox::{AfterSave, BootMachine, ContinueAs, RefusalKind, SandboxClient};

use super::saved::{save, saved};
use super::support::own_os::{config, machine, says};
use super::support::pod::{Pod, launch};

/// The unit of memory that may be plugged in.
const UNIT: u64 = 128 << 20;

async fn refused_cpus(sandbox: &SandboxClient, count: u8) -> (Option<RefusalKind>, String) {
    let error = sandbox.set_vcpus(count).await.unwrap_err();
    (error.kind(), error.to_string())
}

#[tokio::test]
async fn a_machine_gets_the_cpus_and_the_memory_that_it_was_made_for_and_keeps_them() {
    let pod = Pod::default();
    let mut launched = config(&pod);
    (launched.max_vcpus, launched.growth) = (3, UNIT);
    let memory = launched.memory;
    let sandbox = launch(launched).await.unwrap();
    let boot = BootMachine {
        max_vcpus: 3,
        growth: UNIT,
        ..machine(&pod, "vm")
    };
    sandbox.boot_machine(boot).await.unwrap();
    says(&pod, "vm", 1).await;
    let (kind, said) = refused_cpus(&sandbox, 4).await;
    assert_eq!(kind, Some(RefusalKind::InvalidArgument));
    assert!(said.contains("made for 3 at most"), "{said}");
    sandbox.set_vcpus(2).await.unwrap();
    // Again, by who does not know that it was done.
    sandbox.set_vcpus(2).await.unwrap();
    sandbox.pause().await.unwrap();
    let (kind, said) = refused_cpus(&sandbox, 3).await;
    assert_eq!(kind, Some(RefusalKind::WrongState), "{said}");
    sandbox.resume().await.unwrap();

    // The next machine has them from its boot on.
    sandbox.reset_machine("vm").await.unwrap();
    says(&pod, "vm", 2).await;
    let (kind, said) = refused_cpus(&sandbox, 1).await;
    assert_eq!(kind, Some(RefusalKind::WrongState));
    assert!(said.contains("has 2 CPUs"), "{said}");
    sandbox.set_vcpus(3).await.unwrap();

    // Without a driver nothing of it is plugged in, now or in the next machine.
    let plug = async |bytes| sandbox.grow(memory, bytes, UNIT, Duration::ZERO).await;
    assert_eq!(plug(UNIT).await.unwrap(), 0);
    let error = plug(2 * UNIT).await.unwrap_err();
    assert_eq!(error.kind(), Some(RefusalKind::InvalidArgument), "{error}");
    sandbox.reset_machine("vm").await.unwrap();
    says(&pod, "vm", 3).await;
    assert_eq!(plug(UNIT).await.unwrap(), 0);
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_machine_is_not_made_for_more_than_its_sandbox() {
    let pod = Pod::default();
    let sandbox = launch(config(&pod)).await.unwrap();
    for (growth, grown) in [(2 * UNIT, 0), (0, UNIT)] {
        let boot = BootMachine {
            growth,
            grown,
            ..machine(&pod, "vm")
        };
        let error = sandbox.boot_machine(boot).await.unwrap_err();
        assert_eq!(error.kind(), Some(RefusalKind::InvalidArgument), "{error}");
    }
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_saved_machine_has_the_cpus_that_were_plugged_in_whoever_knows_of_them() {
    let (pod, next) = (Pod::default(), Pod::default());
    let made = |pod: &Pod, vcpus, max_vcpus| BootMachine {
        vcpus,
        max_vcpus,
        ..machine(pod, "vm")
    };
    let sandbox_of = async |pod: &Pod| {
        let mut launched = config(pod);
        launched.max_vcpus = 3;
        launch(launched).await.unwrap()
    };
    let sandbox = sandbox_of(&pod).await;
    sandbox.boot_machine(made(&pod, 1, 3)).await.unwrap();
    says(&pod, "vm", 1).await;
    sandbox.set_vcpus(2).await.unwrap();
    let (files, state, memory) = save(&pod, "saved", AfterSave::End);
    // While it is being saved nothing is plugged in: before it, or not at all.
    let (done, late) = tokio::join!(sandbox.save_machine("vm", files), sandbox.set_vcpus(3));
    done.unwrap();
    let has = 2 + u8::from(late.is_ok());
    sandbox.shutdown(Duration::ZERO).await.unwrap();

    let sandbox = sandbox_of(&next).await;
    let mut small = made(&next, 1, 1);
    small.saved = saved(&state, &memory, ContinueAs::Copy);
    let refused = sandbox.boot_machine(small).await.unwrap_err();
    assert!(refused.to_string().contains("1 CPUs"), "{refused}");
    // Its first size is all that is known here.
    let mut same = made(&next, 1, 3);
    same.saved = saved(&state, &memory, ContinueAs::Same);
    sandbox.boot_machine(same).await.unwrap();
    let (kind, said) = refused_cpus(&sandbox, 1).await;
    assert_eq!(kind, Some(RefusalKind::WrongState));
    assert!(said.contains(&format!("has {has} CPUs")), "{said}");
    sandbox.set_vcpus(3).await.unwrap();
    sandbox.reset_machine("vm").await.unwrap();
    says(&next, "vm", 1).await;
    sandbox.shutdown(Duration::ZERO).await.unwrap();
}
