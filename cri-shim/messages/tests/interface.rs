//! Names and numbers of the interface, compared with those of another implementation.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use http_body_util::Full;
use podvisor_cri_messages::*;
use prost::Message;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::Request;
use tonic::{Code, Status};

const INTERFACE: &str = include_str!("interface.txt");

/// A block of the file: its kind, its name and its lines.
type Block = (&'static str, &'static str, Vec<&'static str>);

fn blocks() -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    for line in INTERFACE.lines().filter(|line| !line.starts_with('#')) {
        match (line.strip_prefix("  "), blocks.last_mut()) {
            (Some(line), Some((_, _, lines))) => lines.push(line),
            _ => {
                let (kind, name) = line.split_once(' ').unwrap();
                blocks.push((kind, name, Vec::new()));
            }
        }
    }
    blocks
}

fn of_kind(kind: &str) -> BTreeMap<&'static str, Vec<&'static str>> {
    let blocks = blocks().into_iter().filter(|block| block.0 == kind);
    blocks.map(|(_, name, lines)| (name, lines)).collect()
}

fn bytes(lines: &[&str]) -> Vec<u8> {
    let digits: String = lines
        .iter()
        .filter_map(|line| line.strip_prefix("= "))
        .collect();
    let pairs = digits.as_bytes().chunks(2);
    let pairs = pairs.map(|pair| std::str::from_utf8(pair).unwrap());
    pairs
        .map(|pair| u8::from_str_radix(pair, 16).unwrap())
        .collect()
}

/// Returns a name as it is in Rust: `CDI_devices` and `uidMappings` are `cdi_devices` and
/// `uid_mappings`.
fn snake(name: &str) -> String {
    let mut snake = String::new();
    let mut after_lower = false;
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && after_lower {
            snake.push('_');
        }
        after_lower = letter.is_ascii_lowercase();
        snake.push(letter.to_ascii_lowercase());
    }
    snake
}

/// Decodes what the other implementation wrote: nothing may be lost, and each value must be in the
/// field of that name.
fn check<M: Message + Default + Debug>(name: &str, lines: &[&str]) {
    let golden = bytes(lines);
    let message = M::decode(golden.as_slice()).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(message.encode_to_vec(), golden, "{name}: {message:?}");
    if name == "AuthConfig" {
        // It does not show its fields.
        return;
    }
    let shown = format!("{message:?}");
    for field in lines.iter().filter(|line| !line.starts_with('=')) {
        let words: Vec<&str> = field.splitn(3, ' ').collect();
        let [number, field, kind] = words[..] else {
            panic!("{name}: {field}");
        };
        let value = match kind {
            "string" => format!("{:?}", field),
            "bool" => "true".to_owned(),
            "int32" | "int64" => format!("-{number}"),
            "uint32" | "uint64" => number.to_owned(),
            "double" => format!("{number}.5"),
            _ => String::new(),
        };
        let expected = format!("{}: {value}", snake(field));
        assert!(
            shown.contains(&expected),
            "{name}: no `{expected}` in {shown}"
        );
    }
}

macro_rules! messages {
    ($($name:ident $(as $theirs:ident)?,)*) => {
        #[test]
        fn every_field_has_the_name_and_number_of_the_interface() {
            let mut left = of_kind("message");
            $(
                let name = theirs!($name $($theirs)?);
                let lines = left.remove(name).unwrap_or_else(|| panic!("there is no {name}"));
                check::<$name>(name, &lines);
            )*
            let left: Vec<_> = left.into_keys().collect();
            assert!(left.is_empty(), "not here: {left:?}");
        }
    };
}

macro_rules! enums {
    ($($name:ident $(as $theirs:ident)?,)*) => {
        #[test]
        fn every_value_has_the_name_and_number_of_the_interface() {
            let mut left = of_kind("enum");
            $(
                let name = theirs!($name $($theirs)?);
                let lines = left.remove(name).unwrap_or_else(|| panic!("there is no {name}"));
                let count = i32::try_from(lines.len()).unwrap();
                for line in lines {
                    let (number, value) = line.split_once(' ').unwrap();
                    let found = $name::try_from(number.parse::<i32>().unwrap()).unwrap();
                    let value = value.strip_prefix("SIGNAL_").unwrap_or(value).replace('_', "");
                    let shown = format!("{found:?}");
                    assert!(shown.eq_ignore_ascii_case(&value), "{name}: {shown} is {value}");
                }
                assert!($name::try_from(count).is_err(), "{name} has more values");
            )*
            assert!(left.is_empty(), "not here: {left:?}");
        }
    };
}

macro_rules! theirs {
    ($name:ident) => {
        stringify!($name)
    };
    ($name:ident $theirs:ident) => {
        stringify!($theirs)
    };
}

messages! {
    AttachRequest,
    AttachResponse,
    AuthConfig,
    Capability,
    CdiDevice as CDIDevice,
    CheckpointContainerRequest,
    CheckpointContainerResponse,
    CheckpointPodRequest,
    CheckpointPodResponse,
    Container,
    ContainerAttributes,
    ContainerConfig,
    ContainerEventResponse,
    ContainerFilter,
    ContainerMetadata,
    ContainerMetrics,
    ContainerResources,
    ContainerStateValue,
    ContainerStats,
    ContainerStatsFilter,
    ContainerStatsRequest,
    ContainerStatsResponse,
    ContainerStatus,
    ContainerStatusRequest,
    ContainerStatusResponse,
    ContainerUser,
    CpuUsage,
    CreateContainerRequest,
    CreateContainerResponse,
    Device,
    DnsConfig as DNSConfig,
    ExecRequest,
    ExecResponse,
    ExecSyncRequest,
    ExecSyncResponse,
    FilesystemIdentifier,
    FilesystemUsage,
    GetEventsRequest,
    HugepageLimit,
    IdMapping as IDMapping,
    Image,
    ImageFilter,
    ImageFsInfoRequest,
    ImageFsInfoResponse,
    ImageSpec,
    ImageStatusRequest,
    ImageStatusResponse,
    Int64Value,
    IoUsage,
    KeyValue,
    LinuxContainerConfig,
    LinuxContainerResources,
    LinuxContainerSecurityContext,
    LinuxContainerUser,
    LinuxPodSandboxConfig,
    LinuxPodSandboxStats,
    LinuxPodSandboxStatus,
    LinuxRuntimeConfiguration,
    LinuxSandboxSecurityContext,
    ListContainersRequest,
    ListContainersResponse,
    ListContainerStatsRequest,
    ListContainerStatsResponse,
    ListImagesRequest,
    ListImagesResponse,
    ListMetricDescriptorsRequest,
    ListMetricDescriptorsResponse,
    ListPodSandboxMetricsRequest,
    ListPodSandboxMetricsResponse,
    ListPodSandboxRequest,
    ListPodSandboxResponse,
    ListPodSandboxStatsRequest,
    ListPodSandboxStatsResponse,
    MemoryUsage,
    Metric,
    MetricDescriptor,
    Mount,
    Namespace,
    NamespaceOption,
    NetworkConfig,
    NetworkInterfaceUsage,
    NetworkUsage,
    PodIp as PodIP,
    PodSandbox,
    PodSandboxAttributes,
    PodSandboxConfig,
    PodSandboxFilter,
    PodSandboxMetadata,
    PodSandboxMetrics,
    PodSandboxNetworkStatus,
    PodSandboxStateValue,
    PodSandboxStats,
    PodSandboxStatsFilter,
    PodSandboxStatsRequest,
    PodSandboxStatsResponse,
    PodSandboxStatus,
    PodSandboxStatusRequest,
    PodSandboxStatusResponse,
    PortForwardRequest,
    PortForwardResponse,
    PortMapping,
    ProcessUsage,
    PsiData,
    PsiStats,
    PullImageRequest,
    PullImageResponse,
    RemoveContainerRequest,
    RemoveContainerResponse,
    RemoveImageRequest,
    RemoveImageResponse,
    RemovePodSandboxRequest,
    RemovePodSandboxResponse,
    ReopenContainerLogRequest,
    ReopenContainerLogResponse,
    RestoredContainer,
    RestorePodRequest,
    RestorePodResponse,
    RunPodSandboxRequest,
    RunPodSandboxResponse,
    RuntimeCondition,
    RuntimeConfig,
    RuntimeConfigRequest,
    RuntimeConfigResponse,
    RuntimeFeatures,
    RuntimeHandler,
    RuntimeHandlerFeatures,
    RuntimeStatus,
    SecurityProfile,
    SeLinuxOption as SELinuxOption,
    StartContainerRequest,
    StartContainerResponse,
    StatusRequest,
    StatusResponse,
    StopContainerRequest,
    StopContainerResponse,
    StopPodSandboxRequest,
    StopPodSandboxResponse,
    StreamContainersRequest,
    StreamContainersResponse,
    StreamContainerStatsRequest,
    StreamContainerStatsResponse,
    StreamImagesRequest,
    StreamImagesResponse,
    StreamPodSandboxesRequest,
    StreamPodSandboxesResponse,
    StreamPodSandboxMetricsRequest,
    StreamPodSandboxMetricsResponse,
    StreamPodSandboxStatsRequest,
    StreamPodSandboxStatsResponse,
    SwapUsage,
    UInt64Value,
    UpdateContainerResourcesRequest,
    UpdateContainerResourcesResponse,
    UpdatePodSandboxResourcesRequest,
    UpdatePodSandboxResourcesResponse,
    UpdateRuntimeConfigRequest,
    UpdateRuntimeConfigResponse,
    UserNamespace,
    VersionRequest,
    VersionResponse,
    WindowsContainerConfig,
    WindowsContainerResources,
    WindowsContainerSecurityContext,
    WindowsContainerStats,
    WindowsCpuGroupAffinity,
    WindowsCpuUsage,
    WindowsFilesystemUsage,
    WindowsMemoryUsage,
    WindowsNamespaceOption,
    WindowsNetworkInterfaceUsage,
    WindowsNetworkUsage,
    WindowsPodSandboxConfig,
    WindowsPodSandboxStats,
    WindowsProcessUsage,
    WindowsSandboxSecurityContext,
}

enums! {
    Protocol,
    MountPropagation,
    NamespaceMode,
    SupplementalGroupsPolicy,
    SecurityProfileType as ProfileType,
    PodSandboxState,
    Signal,
    ContainerState,
    ContainerEventType,
    MetricType,
    CgroupDriver,
}

/// Implements nothing.
struct Nothing;

impl RuntimeService for Nothing {}

impl ImageService for Nothing {}

/// Calls a method with a message that cannot be decoded: only one that the service has reads it.
async fn code<S>(mut service: S, path: &str) -> Code
where
    S: Service<Request<Body>, Response = tonic::codegen::http::Response<Body>>,
    S::Error: Debug,
{
    let body = Body::new(Full::new([0, 0, 0, 0, 1, 0xff].as_slice().into()));
    let request = Request::builder().uri(path).body(body).unwrap();
    let answer = service.call(request).await.unwrap();
    Status::from_header_map(answer.headers()).unwrap().code()
}

#[tokio::test]
async fn every_call_of_the_interface_is_served_by_its_name() {
    let services = of_kind("service");
    let names: BTreeSet<&str> = services.keys().copied().collect();
    let own = [
        RuntimeServiceServer::<Nothing>::NAME,
        ImageServiceServer::<Nothing>::NAME,
    ];
    assert_eq!(names, own.into());
    for (service, calls) in services {
        for call in calls.into_iter().chain(["NoSuchCall"]) {
            let name = call.split(' ').next().unwrap();
            let path = format!("/{service}/{name}");
            let code = match service {
                "runtime.v1.RuntimeService" => {
                    code(RuntimeServiceServer::new(Nothing), &path).await
                }
                _ => code(ImageServiceServer::new(Nothing), &path).await,
            };
            let is_known = code != Code::Unimplemented;
            assert_eq!(is_known, name != "NoSuchCall", "{path}: {code:?}");
        }
    }
}

#[tokio::test]
async fn a_client_gets_the_answer_of_the_server_and_of_what_is_not_implemented_just_that() {
    struct Version;

    impl RuntimeService for Version {
        async fn version(
            &self,
            request: tonic::Request<VersionRequest>,
        ) -> Result<tonic::Response<VersionResponse>, Status> {
            Ok(tonic::Response::new(VersionResponse {
                version: request.into_inner().version,
                ..VersionResponse::default()
            }))
        }

        async fn get_container_events(
            &self,
            _: tonic::Request<GetEventsRequest>,
        ) -> Result<tonic::Response<Messages<ContainerEventResponse>>, Status> {
            let event = |container_id: &str| ContainerEventResponse {
                container_id: container_id.to_owned(),
                ..ContainerEventResponse::default()
            };
            let events = [Ok(event("a")), Ok(event("b"))];
            Ok(tonic::Response::new(Box::pin(tokio_stream::iter(events))))
        }
    }

    let mut client = RuntimeServiceClient::new(RuntimeServiceServer::new(Version));
    let request = VersionRequest {
        version: "v1".to_owned(),
    };
    let answer = client.version(request).await.unwrap().into_inner();
    assert_eq!(answer.version, "v1");
    let events = client.get_container_events(GetEventsRequest {}).await;
    let mut events = events.unwrap().into_inner();
    let mut ids = Vec::new();
    while let Some(event) = events.message().await.unwrap() {
        ids.push(event.container_id);
    }
    assert_eq!(ids, ["a", "b"]);
    let refused = client.status(StatusRequest::default()).await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::Unimplemented, "")
    );
}

#[test]
fn credentials_are_not_shown() {
    let auth = AuthConfig {
        username: "user".to_owned(),
        password: "secret".to_owned(),
        auth: "secret".to_owned(),
        identity_token: "secret".to_owned(),
        registry_token: "secret".to_owned(),
        ..AuthConfig::default()
    };
    let request = PullImageRequest {
        auth: Some(auth),
        ..PullImageRequest::default()
    };
    let shown = format!("{request:?}");
    assert!(
        shown.contains("user") && !shown.contains("secret"),
        "{shown}"
    );
}
