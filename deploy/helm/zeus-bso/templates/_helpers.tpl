{{- define "name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}{{ if not (contains "zeus-bso" .Release.Name) }}-zeus-bso{{ end }}
{{- end }}

{{- define "selector" -}}
app.kubernetes.io/name: zeus-bso
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "labels" -}}
{{ include "selector" . }}
app.kubernetes.io/part-of: zeus-plugins
app.kubernetes.io/version: {{ .Chart.AppVersion }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Of all pods: the restricted Pod Security Standard. */ -}}
{{- define "pod" -}}
automountServiceAccountToken: false
# Kubernetes' variables for the Service would begin as the settings do.
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- define "databaseVolume" -}}
- name: database
  secret:
    secretName: {{ .Values.database.secret }}
    defaultMode: 0440
{{- end }}

{{- define "dns" -}}
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: kube-system
  ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}

{{- define "admit" -}}
- from:
    - namespaceSelector:
        matchLabels: {{ toJson . }}
  ports:
    - port: http
{{- end }}
