{{- /* The enabled models, merged with the defaults, as YAML under `models`. */ -}}
{{- define "omni.models" -}}
{{- $models := list -}}
{{- $taken := list -}}
{{- range .Values.servingEngineSpec.modelSpec -}}
{{- $model := mergeOverwrite (deepCopy $.Values.servingEngineSpec.modelDefaults) (deepCopy .) -}}
{{- if $model.enabled -}}
{{- range $object := include "omni.objects" (dict "root" $ "model" $model) | fromJsonArray -}}
{{- if has $object $taken -}}
{{- fail (printf "modelSpec %s: the objects of another model are called %s, too: choose another name" $model.name (base $object)) -}}
{{- end -}}
{{- $taken = append $taken $object -}}
{{- end -}}
{{- $models = append $models $model -}}
{{- end -}}
{{- end -}}
models: {{ toJson $models }}
{{- end -}}

{{- /* Objects of a model that may have the name of another model's, as KIND/NAME in JSON. NetworkPolicy: and all of that name. */ -}}
{{- define "omni.objects" -}}
{{- $name := include "omni.name" . -}}
{{- $objects := list -}}
{{- range $object := list "Service/%s" "Service/%s-fleet" "Service/%s-nodes" "NetworkPolicy/%s-head" -}}
{{- $objects = append $objects (printf $object $name) -}}
{{- end -}}
{{- range $set := (include "omni.nodeSets" (dict "model" .model) | fromYaml).sets -}}
{{- $nodes := include "omni.nodeName" (dict "root" $.root "model" $set) -}}
{{- $objects = append $objects (print "NetworkPolicy/" $nodes) -}}
{{- /* LeaderWorkerSet makes a Service of its own name. */ -}}
{{- if gt (int64 $set.nodeSpec.machines) 1 -}}
{{- $objects = append $objects (print "Service/" $nodes) -}}
{{- end -}}
{{- end -}}
{{- toJson $objects -}}
{{- end -}}

{{- /* The sets of nodes of (dict "model" MODEL), as YAML under `sets`: the model, or for each stage the model with its values. */ -}}
{{- define "omni.nodeSets" -}}
{{- $sets := list -}}
{{- $names := list -}}
{{- range $id, $stage := .model.stages -}}
{{- if has $stage.name $names -}}
{{- fail (printf "modelSpec %s: stages: the name %s is given twice" $.model.name $stage.name) -}}
{{- end -}}
{{- $names = append $names $stage.name -}}
{{- $own := omit $stage "name" "pipeline" -}}
{{- $sets = append $sets (mergeOverwrite (deepCopy $.model) (deepCopy $own) (dict "stageId" $id "stageName" $stage.name)) -}}
{{- end -}}
sets: {{ toJson ($sets | default (list .model)) }}
{{- end -}}

{{- /* Refuses values of a set of nodes that contradict each other. */ -}}
{{- define "omni.checkNodes" -}}
{{- $where := printf "modelSpec %s" .name -}}
{{- with .stageName -}}{{- $where = printf "%s, stage %s" $where . -}}{{- end -}}
{{- $node := .nodeSpec -}}
{{- $replicas := int64 $node.replicasPerPod -}}
{{- $heads := int64 .headSpec.replicaCount -}}
{{- $machines := int64 $node.machines -}}
{{- if and (gt $machines 1) (or .stages (gt $replicas 1)) -}}
{{- fail (print $where ": nodeSpec.machines above 1 needs nodeSpec.replicasPerPod 1, and no stages") -}}
{{- end -}}
{{- $ports := splitList "-" $node.ports -}}
{{- /* An update starts a new head before it ends an old one, but not of the first head. */ -}}
{{- $needed := mul $replicas (add1 (mul 2 (gt $heads 1 | ternary (add1 $heads) $heads))) -}}
{{- if lt (add1 (sub (index $ports 1 | int64) (index $ports 0 | int64))) $needed -}}
{{- fail (printf "%s: nodeSpec.ports %s: nodeSpec.replicasPerPod %d and headSpec.replicaCount %d need %d ports, while heads are updated: widen the range" $where $node.ports $replicas $heads $needed) -}}
{{- end -}}
{{- $size := mul $replicas (int64 (default 1 .vllmConfig.tensorParallelSize)) -}}
{{- if and .requestGPU (not .resources) (gt $size (mul $machines (int64 .requestGPU))) -}}
{{- fail (printf "%s: vllmConfig.tensorParallelSize %d needs more devices than requestGPU %d, with nodeSpec.machines %d and replicasPerPod %d" $where (int64 (default 1 .vllmConfig.tensorParallelSize)) (int64 .requestGPU) $machines $replicas) -}}
{{- end -}}
{{- if and .keda.enabled (gt (int64 .keda.minReplicaCount) (int64 .keda.maxReplicaCount)) -}}
{{- fail (printf "%s: keda.minReplicaCount %d is above maxReplicaCount %d" $where (int64 .keda.minReplicaCount) (int64 .keda.maxReplicaCount)) -}}
{{- end -}}
{{- end -}}

{{- /* Below, the context is (dict "root" $ "model" MODEL OR SET), in some cases with "component" (head or node) and "first". */ -}}

{{- /* Name of a model's objects. A StatefulSet's name may have 52 characters, since labels may have 63. */ -}}
{{- define "omni.name" -}}
{{- printf "%s-%s" .root.Release.Name .model.name | trunc 42 | trimSuffix "-" -}}
{{- end -}}

{{- /* Name of a set of nodes, likewise of at most 52 characters. */ -}}
{{- define "omni.nodeName" -}}
{{- with .model.stageName -}}
{{- include "omni.name" $ | trunc (int (sub 46 (len .))) | trimSuffix "-" }}-node-{{ . }}
{{- else -}}
{{- include "omni.name" . }}-node
{{- end -}}
{{- end -}}

{{- define "omni.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
model: {{ .model.name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .model.stageName }}
vllm-omni/stage: {{ . }}
{{- end }}
{{- end -}}

{{- define "omni.labels" -}}
{{ include "omni.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "omni.metadata" -}}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "omni.labels" . | nindent 2 }}
{{- with .model.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Name and key of a secret (dict "root" $ "given" VALUE "key" KEY); VALUE is the secret or a reference to it. */ -}}
{{- define "omni.secretKey" -}}
{{- if kindIs "string" .given -}}
name: {{ .root.Release.Name }}-secrets
key: {{ .key }}
{{- else -}}
name: {{ .given.secretName }}
key: {{ .given.secretKey }}
{{- end -}}
{{- end -}}

{{- /* The Secret of what is given as values for (dict "root" $ "models" MODELS). */ -}}
{{- define "omni.secret" -}}
{{- $spec := .root.Values.servingEngineSpec -}}
{{- $kept := dict -}}
{{- range $key := list "fleetSecret" "adminKey" "vllmApiKey" }}
{{- $given := get $spec $key }}
{{- if and $given (kindIs "string" $given) }}
{{- $_ := set $kept $key $given }}
{{- end }}
{{- end }}
{{- range .models }}
{{- if and .hf_token (kindIs "string" .hf_token) }}
{{- $_ := set $kept (print "hf_token_" .name) .hf_token }}
{{- end }}
{{- end }}
{{- if $kept }}
apiVersion: v1
kind: Secret
metadata:
  name: {{ .root.Release.Name }}-secrets
  namespace: {{ .root.Release.Namespace }}
type: Opaque
data:
  {{- range $key, $secret := $kept }}
  {{ $key }}: {{ $secret | b64enc }}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* Checksums of what pods read at their start only, so that they restart when it changes. */ -}}
{{- define "omni.podAnnotations" -}}
{{- /* The line break is from the file that earlier versions of this chart read here: without it all pods would restart. */ -}}
checksum/secrets: {{ print (include "omni.secret" (dict "root" .root "models" (list .model))) "\n" | sha256sum }}
{{- if .model.stages }}
checksum/pipeline: {{ include "omni.pipeline" . | sha256sum }}
{{- end }}
{{- with .model.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* The file of --omni-pipeline. As JSON, in which large numbers keep all their digits. */ -}}
{{- define "omni.pipeline" -}}
{{- $stages := list -}}
{{- range $id, $stage := .model.stages -}}
{{- $file := mergeOverwrite (dict "engine" "vllm" "replicas" 0) (deepCopy $stage.pipeline) (dict "id" $id "name" $stage.name) -}}
{{- if eq $file.engine "vllm" -}}
{{- $file = merge $file (dict "model" $.model.modelURL) -}}
{{- end -}}
{{- if not $file.policy -}}
{{- $file = mergeOverwrite $file (dict "policy" $.model.headSpec.routingLogic "policy_config" $.model.headSpec.routingOptions) -}}
{{- end -}}
{{- $stages = append $stages $file -}}
{{- end -}}
{{ toPrettyJson (dict "stages" $stages) }}
{{- end -}}

{{- /* Flags that must be equal for heads and nodes, because they affect answers. */ -}}
{{- define "omni.sharedArgs" -}}
{{- $config := .model.vllmConfig -}}
{{- if .model.stages -}}
- --omni-pipeline
- /etc/vllm-omni-pipeline/pipeline.yaml
{{- else }}
- {{ .model.modelURL | quote }}
{{- end }}
{{- with $config.dtype }}
- --dtype
- {{ . | quote }}
{{- end }}
{{- with $config.maxModelLen }}
- --max-model-len
- {{ int64 . | quote }}
{{- end }}
{{- with $config.runner }}
- --runner
- {{ . | quote }}
{{- end }}
{{- with $config.convert }}
- --convert
- {{ . | quote }}
{{- end }}
{{- if hasKey $config "enablePrefixCaching" }}
- {{ ternary "--enable-prefix-caching" "--no-enable-prefix-caching" $config.enablePrefixCaching }}
{{- end }}
{{- if hasKey $config "enableChunkedPrefill" }}
- {{ ternary "--enable-chunked-prefill" "--no-enable-chunked-prefill" $config.enableChunkedPrefill }}
{{- end }}
{{- if .model.enableLoRA }}
- --enable-lora
{{- end }}
{{- with $config.maxLoras }}
- --max-loras
- {{ int64 . | quote }}
{{- end }}
- --omni-master-port
- {{ int64 .root.Values.servingEngineSpec.masterPort | quote }}
- --omni-secret-file
- /run/vllm-omni/fleet.secret
{{- range $config.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "omni.headArgs" -}}
{{- $spec := .root.Values.servingEngineSpec -}}
{{- $head := .model.headSpec -}}
{{ include "omni.sharedArgs" . }}
- --host
- 0.0.0.0
- --port
- {{ int64 $spec.containerPort | quote }}
- --shutdown-timeout
- {{ int64 $head.shutdownTimeout | quote }}
- --omni-replica-wait
- {{ $head.replicaWait | quote }}
{{- if not .model.stages }}
- --omni-lb-policy
- {{ $head.routingLogic | quote }}
{{- with $head.routingOptions }}
- --omni-lb-config
- {{ toJson . | quote }}
{{- end }}
{{- end }}
{{- if $spec.adminKey }}
- --omni-admin-key-file
- /run/vllm-omni/admin.keys
{{- end }}
{{- if $head.rustFrontend }}
{{- if not $spec.adminKey }}
{{- fail (printf "modelSpec %s: headSpec.rustFrontend needs adminKey: without it the probes, nodes and Prometheus cannot reach the port for operators" .model.name) }}
{{- end }}
- --omni-admin-port
- {{ int64 $spec.adminPort | quote }}
{{- end }}
{{- with .model.chatTemplate }}
- --chat-template
- {{ . | quote }}
{{- end }}
- --omni-master-address
{{- if .first }}
- 0.0.0.0
{{- if not .model.stages }}
- --omni-dp-size-local
- "0"
{{- end }}
{{- else }}
- {{ include "omni.name" . }}-fleet
- --omni-join
{{- end }}
{{- range $head.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "omni.nodeArgs" -}}
{{- $config := .model.vllmConfig -}}
{{- $node := .model.nodeSpec -}}
{{ include "omni.sharedArgs" . }}
{{- with $config.tensorParallelSize }}
- --tensor-parallel-size
- {{ int64 . | quote }}
{{- end }}
{{- with $config.gpuMemoryUtilization }}
- --gpu-memory-utilization
- {{ . | quote }}
{{- end }}
{{- with $config.maxNumSeqs }}
- --max-num-seqs
- {{ int64 . | quote }}
{{- end }}
- --headless
{{- if .model.stages }}
- --omni-stage-id
- {{ int64 .model.stageId | quote }}
{{- end }}
- --omni-dp-size-local
- {{ int64 $node.replicasPerPod | quote }}
- --omni-master-address
- {{ include "omni.name" . }}-fleet
- --omni-replica-address
- $(POD_IP)
- --omni-replica-ports
- {{ $node.ports | quote }}
- --omni-drain-timeout
- {{ int64 $node.drainTimeout | quote }}
- --omni-join-timeout
- "0"
{{- if gt (int64 $node.machines) 1 }}
# LeaderWorkerSet sets these variables.
- --nnodes
- {{ int64 $node.machines | quote }}
- --node-rank
- $(LWS_WORKER_INDEX)
- --master-addr
- $(LWS_LEADER_ADDRESS)
{{- end }}
{{- range $node.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "omni.image" -}}
{{- $own := eq .component "head" | ternary .model.headSpec dict -}}
{{ $own.repository | default .model.repository }}:{{ $own.tag | default .model.tag }}
{{- end -}}

{{- define "omni.env" -}}
{{- $spec := .root.Values.servingEngineSpec -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: VLLM_HOST_IP
  value: $(POD_IP)
{{- if $spec.vllmApiKey }}
- name: VLLM_API_KEY
  valueFrom:
    secretKeyRef:
      {{- include "omni.secretKey" (dict "root" .root "given" $spec.vllmApiKey "key" "vllmApiKey") | nindent 6 }}
{{- end }}
{{- with .model.hf_token }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      {{- include "omni.secretKey" (dict "root" $.root "given" . "key" (print "hf_token_" $.model.name)) | nindent 6 }}
{{- end }}
{{- if eq .component "head" }}
# A head computes nothing, and vLLM's builds for GPUs start without one only with this.
- name: VLLM_TARGET_DEVICE
  value: cpu
# Above the idle time of proxies (Envoy's is an hour), since one that reuses a connection as the head closes it answers 502.
- name: VLLM_HTTP_TIMEOUT_KEEP_ALIVE
  value: "3660"
{{- if .model.headSpec.rustFrontend }}
- name: VLLM_USE_RUST_FRONTEND
  value: "1"
{{- end }}
{{- end }}
{{- if and (eq .component "node") .model.pvcStorage }}
- name: HF_HOME
  value: /data
{{- end }}
{{- with .model.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* The fleet refuses a secret file that other users own or may read, as mounted secrets are. */ -}}
{{- define "omni.initContainers" -}}
- name: secret
  image: {{ include "omni.image" . | quote }}
  imagePullPolicy: {{ .root.Values.servingEngineSpec.imagePullPolicy }}
  {{- with .root.Values.servingEngineSpec.containerSecurityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  command: [sh, -c, "umask 077 && cp /etc/vllm-omni/* /run/vllm-omni/"]
  volumeMounts:
    - name: secrets
      mountPath: /etc/vllm-omni
      readOnly: true
    - name: run
      mountPath: /run/vllm-omni
{{- end -}}

{{- /* The root file system is read-only. */ -}}
{{- define "omni.mounts" -}}
- name: run
  mountPath: /run/vllm-omni
- name: home
  mountPath: /home/vllm
- name: tmp
  mountPath: /tmp
{{- if .model.stages }}
- name: pipeline
  mountPath: /etc/vllm-omni-pipeline
  readOnly: true
{{- end }}
{{- with .model.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "omni.volumes" -}}
{{- $spec := .root.Values.servingEngineSpec -}}
- name: run
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
- name: home
  emptyDir: {}
- name: tmp
  emptyDir: {}
- name: secrets
  projected:
    sources:
      {{- $fleet := fromYaml (include "omni.secretKey" (dict "root" .root "given" $spec.fleetSecret "key" "fleetSecret")) }}
      - secret:
          name: {{ $fleet.name }}
          items:
            - key: {{ $fleet.key }}
              path: fleet.secret
      {{- if and (eq .component "head") $spec.adminKey }}
      {{- $admin := fromYaml (include "omni.secretKey" (dict "root" .root "given" $spec.adminKey "key" "adminKey")) }}
      - secret:
          name: {{ $admin.name }}
          items:
            - key: {{ $admin.key }}
              path: admin.keys
      {{- end }}
{{- if .model.stages }}
- name: pipeline
  configMap:
    name: {{ include "omni.name" . }}-pipeline
{{- end }}
{{- with .model.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Placement of pods; (dict "root" $ "at" values with the affinity). */ -}}
{{- define "omni.placement" -}}
{{- if .at.affinity }}
affinity:
  {{- toYaml .at.affinity | nindent 2 }}
{{- else if .at.nodeSelectorTerms }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        {{- toYaml .at.nodeSelectorTerms | nindent 8 }}
{{- end }}
{{- with concat .root.Values.servingEngineSpec.tolerations .at.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .at.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{- define "omni.podSpec" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .model.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .model.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .model.imagePullSecret }}
imagePullSecrets:
  - name: {{ . }}
{{- end }}
{{- with .root.Values.servingEngineSpec.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
initContainers:
  {{- include "omni.initContainers" . | nindent 2 }}
{{- end -}}

{{- /* The common part of the containers of heads and nodes; arguments, ports, probes and volumes follow. */ -}}
{{- define "omni.container" -}}
image: {{ include "omni.image" . | quote }}
imagePullPolicy: {{ .root.Values.servingEngineSpec.imagePullPolicy }}
{{- with .root.Values.servingEngineSpec.containerSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .model.envFromSecret }}
envFrom:
  - secretRef:
      name: {{ .name }}
{{- end }}
{{- end -}}

{{- define "omni.resources" -}}
{{- if .resources -}}
{{ toYaml .resources }}
{{- else -}}
requests:
  cpu: {{ .requestCPU | quote }}
  memory: {{ .requestMemory }}
  {{- if .requestGPU }}
  {{ .requestGPUType }}: {{ .requestGPU | quote }}
  {{- end }}
{{- if or .requestGPU .limitCPU .limitMemory }}
limits:
  {{- with .limitCPU }}
  cpu: {{ . | quote }}
  {{- end }}
  {{- with .limitMemory }}
  memory: {{ . }}
  {{- end }}
  {{- if .requestGPU }}
  {{ .requestGPUType }}: {{ .requestGPU | quote }}
  {{- end }}
{{- end }}
{{- end -}}
{{- end -}}
