"""Chat templates with the logic of templates published with eight model families.

They are written for the tests and use the control tokens of `conversations.py`.
"""

from __future__ import annotations

QWEN2 = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] %}
{%- else %}
    {%- set first = 'Be helpful.' %}
{%- endif %}
{{- '<|im_start|>system\\n' + first }}
{%- if tools %}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<call>' + (call.function | tojson) + '</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.looking and message.role == 'user' and message.content is string %}
        {%- set ns.looking = false %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<call>' + (call.function | tojson) + '</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA31 = """\
{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set first = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nDate: 26 Jul 2024\\n' + first }}
{%- if tools is not none %}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson(indent=4)) }}{%- endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls %}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- (message.tool_calls[0].function.arguments | tojson) + '}' }}
    {%- else %}
        {{- message['content'] | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] + '\\n\\n' %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set first = '' %}{%- set turns = messages %}
{%- endif %}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<|im_start|>' + role + '\\n' + (first if loop.first else '') }}
    {{- message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>model\\n' }}{%- endif %}
"""
MISTRAL3 = """\
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == asked[-1] %}
            {{- '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message['content'] + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[CALLS]' }}
        {%- for call in message.tool_calls %}{{- call.function | tojson }}{%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- else %}
        {{- '[' + message['role'] + ']' + message['content'] + '[/]' }}
    {%- endif %}
{%- endfor %}
"""
DEEPSEEK = """\
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{%- set ns.system = message['content'] %}{%- endif %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<|User|>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' and 'tool_calls' in message %}
        {%- if message['content'] is none %}
            {{- '<|Assistant|>' }}
        {%- else %}
            {{- '<|Assistant|>' + message['content'] }}
        {%- endif %}
        {%- for call in message['tool_calls'] %}
            {{- '<call>' + call['function']['name'] + (call['function']['arguments'] | tojson) }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|Assistant|>' + message['content'].split('</think>')[-1] + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '<|Tool|>' + message['content'] }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}
"""
GPT_OSS = """\
{{- '<|im_start|>system<|im_end|>' + (model_identity | default('You are a model.')) }}
{%- if tools %}{{- 'tools ' + (tools | tojson) }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if 'content' in message and '<channel>' in message.content %}
            {{- raise_exception('channels in content') }}
        {%- endif %}
        {%- if 'tool_calls' in message %}
            {%- set ns = namespace(final=false) %}
            {%- for later in messages[loop.index:] %}
                {%- if later.role == 'assistant' and 'tool_calls' not in later %}
                    {%- set ns.final = true %}
                {%- endif %}
            {%- endfor %}
            {%- if message.reasoning_content and not ns.final %}
                {{- '<|im_start|>assistant<channel>analysis ' + message.reasoning_content }}
                {{- '<|im_end|>' }}
            {%- endif %}
            {{- '<|im_start|>assistant to=' + message.tool_calls[0].function.name }}
            {{- (message.tool_calls[0].function.arguments | tojson) + '<|eot_id|>' }}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if message.reasoning_content %}
                {{- '<|im_start|>assistant<channel>analysis ' + message.reasoning_content }}
                {{- '<|im_end|>' }}
            {%- endif %}
            {{- '<|im_start|>assistant<channel>final ' + message.content + eos_token }}
        {%- else %}
            {{- '<|im_start|>assistant<channel>final ' + message.content + '<|im_end|>' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + ' ' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}
"""
MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {%- if message.content %}{{- message.content }}{%- endif %}
            {%- for call in message.tool_calls or [] %}
                {{- '<call>' + (call.function | tojson) + '</call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
STYLES = {
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "llama31": LLAMA31,
    "gemma3": GEMMA3,
    "mistral3": MISTRAL3,
    "deepseek": DEEPSEEK,
    "gpt_oss": GPT_OSS,
    "marked": MARKED,
}
