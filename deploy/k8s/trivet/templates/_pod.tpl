{{/* What the pods have in common. All are called with (dict "root" $ "component" NAME "values" .Values.NAME). */}}

{{- define "trivet.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.user }}
runAsGroup: {{ .Values.user }}
fsGroup: {{ .Values.user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "trivet.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "trivet.podMetadata" -}}
labels:
  {{- include "trivet.componentSelector" . | nindent 2 }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/config: {{ include "trivet.checksum" .root }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Identity and placement. */}}
{{- define "trivet.podSpec" -}}
serviceAccountName: {{ include "trivet.fullname" .root }}-{{ .component }}
automountServiceAccountToken: false
enableServiceLinks: false
# Process 1 is Kubernetes' own: it reaps what scorers and ranks leave behind.
shareProcessNamespace: true
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "trivet.podSecurity" .root | nindent 2 }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $affinity := .values.affinity | default dict }}
{{- if .root.Values.singleNode }}
{{- $together := dict "labelSelector" (dict "matchLabels" (include "trivet.selector" .root | fromYaml)) "topologyKey" "kubernetes.io/hostname" }}
{{- $affinity = mergeOverwrite (dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $together))) $affinity }}
{{- end }}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and .values.topologySpread (not .root.Values.singleNode) }}
topologySpreadConstraints:
  {{- range .values.topologySpread }}
  - {{- toYaml . | nindent 4 }}
    labelSelector:
      matchLabels:
        {{- include "trivet.componentSelector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "trivet.container" -}}
image: {{ include "trivet.image" (dict "root" .root "image" .values.image) }}
imagePullPolicy: {{ .values.image.pullPolicy }}
securityContext:
  {{- include "trivet.containerSecurity" .root | nindent 2 }}
{{- end -}}

{{/* Requests and limits, with `gpus` of the vendor's resource. */}}
{{- define "trivet.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if gt (int .gpus) 0 -}}
{{- $limits := merge (dict .root.Values.gpuResource (int .gpus)) ($resources.limits | default dict) -}}
{{- $resources = set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* --set arguments that open the service to the cluster; secrets come by file. */}}
{{- define "trivet.serviceArguments" -}}
- --config
- /etc/trivet/config/trivet.yaml
- --set
- {{ .component }}.server.host=0.0.0.0
- --set
- {{ .component }}.server.grpc_port=50051
- --set
- {{ .component }}.server.http_port=8080
{{- end -}}

{{- define "trivet.environment" -}}
{{- $shared := dict "HOME" "/tmp" "TRIVET__REDIS__URL__FILE" "/etc/trivet/secrets/redis-url" -}}
{{- if ne .component "prepare" -}}
{{- $_ := set $shared (printf "TRIVET__%s__SERVER__TOKEN__FILE" (upper .component)) "/etc/trivet/secrets/token" -}}
{{- end -}}
{{- if and (eq .component "trainer") (include "trivet.transfersWeights" .root) -}}
{{- $_ := set $shared "TRIVET__ROLLOUT__SERVER__TOKEN__FILE" "/etc/trivet/secrets/rollout-token" -}}
{{- end -}}
{{- if has .component (list "rollout" "trainer" "prepare") -}}
{{- if include "trivet.localModel" .root -}}
{{- $_ := set $shared "HF_HUB_OFFLINE" "1" -}}
{{- else if .root.Values.storage.inputs.enabled -}}
{{- $_ := set $shared "HF_HOME" "/srv/trivet/models/huggingface" -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := merge (deepCopy (.values.env | default dict)) $shared }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{- define "trivet.mounts" -}}
{{- $writesInputs := or (eq .component "prepare") (not (include "trivet.localModel" .root)) -}}
- name: config
  mountPath: /etc/trivet/config
  readOnly: true
- name: secrets
  mountPath: /etc/trivet/secrets
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/trivet
{{- if .root.Values.extensions.configMap }}
- name: extensions
  mountPath: /srv/trivet/extensions
  readOnly: true
{{- end }}
{{- if has .component (list "rollout" "trainer") }}
- name: scripts
  mountPath: /etc/trivet/scripts
  readOnly: true
- name: shared-memory
  mountPath: /dev/shm
{{- end }}
{{- if has .component (list "rollout" "trainer" "prepare") }}
- name: runs
  mountPath: /srv/trivet/runs
  {{- if and (eq .component "rollout") (not (include "trivet.blobsOnRunVolume" .root)) }}
  readOnly: true
  {{- end }}
{{- if .root.Values.storage.inputs.enabled }}
{{- range list "models" "data" }}
- name: inputs
  mountPath: /srv/trivet/{{ . }}
  subPath: {{ . }}
  {{- if not $writesInputs }}
  readOnly: true
  {{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "trivet.volumes" -}}
- name: config
  configMap:
    name: {{ include "trivet.fullname" .root }}-config
- name: secrets
  secret:
    secretName: {{ include "trivet.secretName" .root }}
    defaultMode: 0440
    items:
      - key: redis-url
        path: redis-url
      {{- if ne .component "prepare" }}
      - key: {{ .component }}-token
        path: token
      {{- end }}
      {{- if and (eq .component "trainer") (include "trivet.transfersWeights" .root) }}
      - key: rollout-token
        path: rollout-token
      {{- end }}
- name: tmp
  emptyDir:
    sizeLimit: {{ .values.temporaryStorage }}
- name: cache
  emptyDir:
    sizeLimit: {{ .values.cacheStorage }}
{{- with .root.Values.extensions.configMap }}
- name: extensions
  configMap:
    name: {{ . }}
{{- end }}
{{- if has .component (list "rollout" "trainer") }}
- name: scripts
  configMap:
    name: {{ include "trivet.fullname" .root }}-scripts
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ .values.sharedMemory }}
{{- end }}
{{- if has .component (list "rollout" "trainer" "prepare") }}
- name: runs
  persistentVolumeClaim:
    claimName: {{ include "trivet.claim" (dict "root" .root "name" "runs") }}
{{- if .root.Values.storage.inputs.enabled }}
- name: inputs
  persistentVolumeClaim:
    claimName: {{ include "trivet.claim" (dict "root" .root "name" "inputs") }}
{{- end }}
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Waits until the prepare Job has left its mark. */}}
{{- define "trivet.waitForPrepare" -}}
{{- if .root.Values.config.prepare }}
initContainers:
  - name: wait-for-prepare
    {{- include "trivet.container" . | nindent 4 }}
    command: [python3, /etc/trivet/scripts/wait.py]
    args:
      - {{ include "trivet.prepareMark" .root | quote }}
      - --seconds={{ .root.Values.prepare.seconds }}
    resources:
      requests: {cpu: 10m, memory: 32Mi}
      limits: {memory: 64Mi}
    volumeMounts:
      {{- include "trivet.mounts" . | nindent 6 }}
{{- end }}
{{- end -}}

{{- define "trivet.prepareMark" -}}
{{- printf "%s.prepared-%s" (include "trivet.path" .Values.config.prepare.creates) (.Values.config.prepare | toJson | sha256sum | trunc 8) -}}
{{- end -}}
