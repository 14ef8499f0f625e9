{{/* towline.image is the image of the hub. */}}
{{- define "towline.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* towline.labels are the labels of every object. A cluster has one hub, so they do not depend on the name of the release. */}}
{{- define "towline.labels" -}}
app.kubernetes.io/name: towline
{{- end }}

{{/* towline.podLabels are the labels of the pods of a Deployment, and its selector. The argument is the shard key, "" for none. */}}
{{- define "towline.podLabels" -}}
app.kubernetes.io/name: towline
{{- if . }}
app.kubernetes.io/component: hub-shard
sharding.projectsveltos.io/key: {{ . | quote }}
{{- else }}
app.kubernetes.io/component: hub
{{- end }}
{{- end }}
